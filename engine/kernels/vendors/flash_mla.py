# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""FlashMLA: sparse attention over bfloat16 keys. It reads none of our packed rows, so a row's keys are unpacked first."""

import flash_mla
import torch

from engine.kernels.ops import pick
from engine.kernels.reference.formats import turned
from engine.kernels.reference.sparse_attention import keys_of


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
    """Return what `engine.kernels.sparse_attention` does; how work is split is its own choice."""
    assert splits > 0
    width = queries.shape[2]
    keys, usable = keys_of(width, ring, record, positions, floors, window, entries, pages, owner, selection)
    at = torch.arange(usable.numel(), device=queries.device, dtype=torch.int32).view_as(usable).masked_fill(~usable, -1)
    made, *_ = flash_mla.flash_mla_sparse_fwd(
        queries, keys.bfloat16().flatten(0, 1)[:, None], at[:, None], width**-0.5, d_v=width, attn_sink=sink
    )
    attended = turned(made.float(), cos, sin, inverse=True)
    return pick("quantize_rows", queries.device)(attended.flatten(1)) if quantized else attended
