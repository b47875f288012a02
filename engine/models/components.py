"""The KV components that models declare: records and strides, as plain numbers. Knows no model and no torch."""

from core.kv import Component, ComponentKind

ELEM_BYTES = {"f64": 8, "i64": 8, "f32": 4, "bf16": 2, "u8": 1}
"""Element types that KV memory knows, and their size."""
RECORD_ALIGN_BYTES = 64


def ring_capacity(window_tokens: int) -> int:
    """Return a ring capacity that holds more than `window_tokens`.

    At least one token more than the window: the surplus slot of the stop-late rule must not overwrite the oldest
    position that is still visible.
    """
    return -(-(window_tokens + 1) // 16) * 16


def token_component(
    name: str,
    kind: ComponentKind,
    *,
    region: int,
    layers: tuple[str, ...],
    heads: int,
    head_dim: int,
    elem: str,
    capacity_tokens: int,
    num_records: int,
) -> Component:
    """Return a paged or ring component; record = [layers, 2 (key, value), heads, capacity_tokens, head_dim] of `elem`."""
    record_bytes = len(layers) * 2 * heads * capacity_tokens * head_dim * ELEM_BYTES[elem]
    return Component(
        name=name,
        kind=kind,
        record_bytes=record_bytes,
        num_records=num_records,
        stride_bytes=-(-record_bytes // RECORD_ALIGN_BYTES) * RECORD_ALIGN_BYTES,
        region=region,
        layers=layers,
        heads=heads,
        head_dim=head_dim,
        elem=elem,
        capacity_tokens=capacity_tokens,
    )
