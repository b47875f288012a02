"""Specification of `engine.kernels.sparse_attention`."""

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
    """Attend over windows and selected entries; see the kernel for shapes. How work is split means nothing here."""
    assert splits > 0
    made = torch.empty_like(queries)
    width, per_page = queries.shape[2], entries.shape[1]
    for i in range(len(queries)):
        first = min(max(int(positions[i]) - window + 1, int(floors[i]), 0), int(positions[i]) + 1)
        seen = torch.arange(first, int(positions[i]) + 1, device=queries.device) % ring.shape[1]
        rows = ring[record[i], seen]
        keys = decode_q8(rows[:, :width], rows[:, width:])
        chosen = selection[i][selection[i] >= 0].long()
        packed = entries[pages[owner[i]][chosen // per_page], chosen % per_page]
        keys = torch.cat((keys, decode_q4kv(packed[:, : width // 2], packed[:, width // 2 :])))
        scores = torch.cat((queries[i].float() @ keys.T * width**-0.5, sink[:, None]), 1)
        made[i] = turned((scores.softmax(1)[:, :-1] @ keys)[None], cos[i : i + 1], sin[i : i + 1], inverse=True)[0]
    return made
