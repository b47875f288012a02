# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""FlashMLA: sparse attention over bfloat16 keys. It reads none of our packed rows, so a row's keys are unpacked first."""

import flash_mla
import torch

from engine.kernels.reference.formats import decode_q4kv, decode_q8, turned


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
) -> torch.Tensor:
    """Return what `engine.kernels.sparse_attention` does; how work is split is its own choice."""
    assert splits > 0
    rows, _, width = queries.shape
    per_page = entries.shape[1]
    seen = positions[:, None] - window + 1 + torch.arange(window, device=queries.device)
    inside = seen >= floors.clamp(min=0)[:, None]
    held = ring[record[:, None], seen % ring.shape[1]]
    chosen = selection.clamp(min=0).long()
    packed = entries[pages[owner[:, None], chosen // per_page].long(), chosen % per_page]
    near = decode_q8(held[..., :width], held[..., width:].contiguous())
    far = decode_q4kv(packed[..., : width // 2], packed[..., width // 2 :].contiguous())
    usable = torch.cat((inside, selection >= 0), 1)
    # What is not attended may hold any bytes, NaN among them.
    keys = torch.cat((near, far), 1).masked_fill(~usable[..., None], 0).bfloat16()
    at = torch.arange(usable.numel(), device=queries.device, dtype=torch.int32).view_as(usable).masked_fill(~usable, -1)
    made, *_ = flash_mla.flash_mla_sparse_fwd(
        queries, keys.flatten(0, 1)[:, None], at[:, None], width**-0.5, d_v=width, attn_sink=sink
    )
    return turned(made.float(), cos, sin, inverse=True).to(queries.dtype).view(rows, *queries.shape[1:])
