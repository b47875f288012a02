"""Specification of `engine.kernels.sparse_attention`."""

import torch

from engine.kernels.reference.formats import decode_q4kv, decode_q8, turned
from engine.kernels.reference.quantize_rows import quantize_rows


def sparse_attention(
    queries: torch.Tensor,
    ring: torch.Tensor,
    record: torch.Tensor,
    positions: torch.Tensor,
    floors: torch.Tensor,
    window: int,
    entries: torch.Tensor,
    pages: torch.Tensor,
    owner: torch.Tensor,
    selection: torch.Tensor,
    sink: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    splits: int,
    *,
    quantized: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend over windows and selected entries; see the kernel for shapes. How work is split means nothing here."""
    assert splits > 0
    keys, usable = keys_of(queries.shape[2], ring, record, positions, floors, window, entries, pages, owner, selection)
    scores = torch.einsum("thd,tkd->thk", queries.float(), keys) * queries.shape[2] ** -0.5
    scores = scores.masked_fill(~usable[:, None], -torch.inf)
    weights = torch.cat((scores, sink[:, None].expand(*scores.shape[:2], 1)), 2).softmax(2)[..., :-1]
    made = turned(torch.einsum("thk,tkd->thd", weights, keys), cos, sin, inverse=True)
    return quantize_rows(made.flatten(1)) if quantized else made


def keys_of(
    width: int,
    ring: torch.Tensor,
    record: torch.Tensor,
    positions: torch.Tensor,
    floors: torch.Tensor,
    window: int,
    entries: torch.Tensor,
    pages: torch.Tensor,
    owner: torch.Tensor,
    selection: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 [t, window + k, D] of what rows may see, zero where they do not, and whether they do."""
    seen = positions[:, None] - window + 1 + torch.arange(window, device=ring.device)
    held = ring[record[:, None], seen % ring.shape[1]]
    chosen = selection.clamp(min=0).long()
    page = pages[owner[:, None], chosen // entries.shape[1]].long()
    packed = entries[page, chosen % entries.shape[1]]
    near = decode_q8(held[..., :width], held[..., width:])
    far = decode_q4kv(packed[..., : width // 2], packed[..., width // 2 :])
    usable = torch.cat((seen >= floors.clamp(min=0)[:, None], selection >= 0), 1)
    # What a row does not see may hold any bytes, NaN among them.
    return torch.cat((near, far), 1).masked_fill(~usable[..., None], 0), usable
