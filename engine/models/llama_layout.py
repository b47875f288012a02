"""The KV components of the Llama family. Knows no tensors."""

from core.kv import Component, ComponentKind, KVLayout
from engine.models.components import ring_capacity, token_component
from engine.models.config import LlamaConfig

FULL, WINDOW = "full", "window"


def llama_layout(config: LlamaConfig, kv_dtype: str, num_pages: int, num_rows: int, page_tokens: int) -> KVLayout:
    """Return components ``full`` and ``window``, each only if the model has such layers."""
    components = list[Component]()
    for name in (FULL, WINDOW):
        layers = tuple(str(i) for i, window in enumerate(config.windows) if (window > 0) == (name == WINDOW))
        if not layers:
            continue
        component = token_component(
            name,
            ComponentKind.PAGED if name == FULL else ComponentKind.RING,
            region=len(components),
            layers=layers,
            heads=config.num_kv_heads,
            head_dim=config.head_dim,
            elem=kv_dtype,
            capacity_tokens=page_tokens if name == FULL else ring_capacity(max(config.windows)),
            num_records=num_pages if name == FULL else num_rows,
        )
        components.append(component)
    return KVLayout(page_tokens=page_tokens, components=tuple(components))
