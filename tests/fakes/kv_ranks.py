"""KV pools of tensor-parallel ranks with recognisable bytes: what each rank must hold is a slice of the full tensor."""

import numpy as np

from core.kv import Component, ComponentKind, KVLayout, Shard
from kv_transfer.shards import heads_of

LAYERS, TOKENS, PAGES, ROWS = 2, 4, 6, 3
ELEMS = {"bf16": (2, 4), "fp8": (1, 16), "scale": (4, 1)}
"""Element -> bytes of it, and how many a head has."""
GROUPS = (8, 8, 16)
"""A convolution state: key, key and value groups, each cut on its own."""


def part(name, elem, tp, rank, heads, axes, kind=ComponentKind.PAGED, region=0) -> Component:
    size, dim = ELEMS[elem]
    local = heads_of(rank, tp, heads)
    record = LAYERS * 2 * len(local) * TOKENS * dim * size
    count = PAGES if kind is ComponentKind.PAGED else ROWS
    return Component(
        name=name, kind=kind, record_bytes=record, num_records=count, stride_bytes=record + 8 * rank, offset=16,
        region=region, layers=tuple(f"layer.{i}" for i in range(LAYERS)), heads=len(local), total_heads=heads,
        first_head=local.start, axes=axes, head_dim=dim, elem=elem, capacity_tokens=TOKENS,
    )  # fmt: skip


def state(tp, rank, region) -> Component:
    cut = tuple(Shard(total, rank * total // tp, total // tp) for total in GROUPS)
    nbytes = sum(s.nbytes for s in cut)
    return Component(
        name="conv", kind=ComponentKind.STATE, record_bytes=nbytes, num_records=ROWS, stride_bytes=nbytes,
        region=region, layers=("layer.0",), elem="u8", shards=cut,
    )  # fmt: skip


def latent(region) -> Component:
    return Component(
        name="latent", kind=ComponentKind.PAGED, record_bytes=40, num_records=PAGES, stride_bytes=40, region=region,
        layers=("layer.0",), elem="u8", capacity_tokens=TOKENS,
    )  # fmt: skip


def layout(tp: int, rank: int, heads: int, axes: str) -> KVLayout:
    return KVLayout(
        page_tokens=TOKENS,
        components=(
            part("kv", "bf16", tp, rank, heads, axes),
            part("kv8", "fp8", tp, rank, heads, axes, region=1),
            part("scales", "scale", tp, rank, heads, axes, region=2),
            part("window", "bf16", tp, rank, heads, axes, ComponentKind.RING, region=3),
            state(tp, rank, 4),
            latent(5),
        ),
    )


def truth(name: str, heads: int, index: int) -> np.ndarray:
    """The full record of a page or row: [layers, 2, heads, tokens, bytes of a head] or flat."""
    rng = np.random.default_rng([len(name), *name.encode(), heads, index])
    if name == "conv":
        return rng.integers(0, 256, sum(GROUPS), np.uint8)
    if name == "latent":
        return rng.integers(0, 256, 40, np.uint8)
    size, dim = ELEMS[{"kv": "bf16", "kv8": "fp8", "scales": "scale", "window": "bf16"}[name]]
    return rng.integers(0, 256, (LAYERS, 2, heads, TOKENS, size * dim), np.uint8)


def own_bytes(component: Component, heads: int, index: int) -> np.ndarray:
    """What a rank must hold of `truth`, by slicing: the oracle."""
    full = truth(component.name, heads, index)
    if component.shards:
        starts = np.cumsum((0, *GROUPS))
        cut = [full[at + s.first : at + s.first + s.nbytes] for at, s in zip(starts, component.shards, strict=False)]
        return np.concatenate(cut)
    if component.heads:
        mine = full[:, :, component.first_head : component.first_head + component.heads]
        full = mine if component.axes == "HND" else mine.transpose(0, 1, 3, 2, 4)
    return full.reshape(-1)


def memory(layout: KVLayout) -> dict[int, np.ndarray]:
    return {c.region: np.zeros(c.offset + c.num_records * c.stride_bytes, np.uint8) for c in layout.components}


def record(component: Component, regions: dict[int, np.ndarray], index: int) -> np.ndarray:
    at = component.offset + index * component.stride_bytes
    return regions[component.region][at : at + component.record_bytes]


def filled(layout: KVLayout, heads: int) -> dict[int, np.ndarray]:
    regions = memory(layout)
    for component in layout.components:
        for index in range(component.num_records):
            record(component, regions, index)[:] = own_bytes(component, heads, index)
    return regions
