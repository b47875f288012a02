"""Specification of `engine.kernels.lay_entries`."""

import torch


def lay_entries(
    positions: torch.Tensor,
    slots: torch.Tensor,
    owner: torch.Tensor,
    record: torch.Tensor,
    q_start: torch.Tensor,
    start: torch.Tensor,
    least: torch.Tensor | None,
    m: int,
    page_tokens: int,
    pending: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return page, place, index, number and record of every token's entry; see the kernel for the rules."""
    is_real = slots >= 0
    done = is_real & ((positions + 1) % m == 0)
    if least is not None:
        done = done & (positions >= least)
    number = torch.arange(len(positions), device=positions.device)
    first, end = q_start.long()[owner], start.long()[owner] + q_start[1:].long()[owner]
    index = number[:, None]
    if m > 1:
        before = torch.where(number == first, len(number) + owner, (number - 1).clamp(min=0))
        index = torch.stack((before, number), 1)
    last = positions >= end - first - pending
    page = slots.div(page_tokens, rounding_mode="floor").masked_fill(~done, -1)
    at = (slots.clamp(min=0) % page_tokens).div(m, rounding_mode="floor")
    return page, at, index, number, record.masked_fill(~(last & is_real), -1)
