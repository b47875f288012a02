"""What each layer of a DeepSeek-V4 or V4.1 model does: who owns compressed KV, who selects entries, who reuses whose.

Built once from the source lists of a configuration; everything else asks the plan of a layer and never the lists.
Knows no tensors.
"""

from collections.abc import Sequence

import msgspec

from core.errors import CheckpointError, ConfigError

WINDOW, FULL, REUSE, REINDEX = "window", "full", "reuse", "reindex"
"""Modes of a layer's attention: window only; owns entries; reads entries and selection of earlier layers; reads entries
of an earlier layer with a selection of its own."""


class LayerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One layer's part in the model. Layer numbers are indices into the backbone (DSpark stages follow it)."""

    index: int
    mode: str
    """window | full | reuse | reindex"""
    m: int
    """Tokens per compressed entry; 0 for a layer without a global part."""
    kv_source: int | None = None
    """Layer whose compressed entries (and index keys) are read; the layer itself if it owns some."""
    index_source: int | None = None
    """Layer whose selection is read; itself if it selects. None with m > 0: all visible entries are read (V4)."""
    is_candidate_source: bool = False
    uses_candidates: bool = False
    """Selects only inside the candidate blocks of the candidate source."""
    has_engram: bool = False
    hash_routed: bool = False
    """Experts come from a table by token id (V4's first layers)."""
    is_captured: bool = False
    """DSpark's context is made of the streams that enter (V4.1) this layer."""
    rope: str = WINDOW
    """window (plain base, no scaling) | compress (long base with YaRN), for everything in the layer."""
    overlap: bool = False
    """Entries are made of two neighbouring groups (V4's m = 4)."""

    @property
    def owns_kv(self) -> bool:
        """Whether the layer writes compressed entries."""
        return self.kv_source == self.index

    @property
    def owns_index_keys(self) -> bool:
        """Whether the layer writes index keys: an owner of entries that are selected from."""
        return self.owns_kv and self.index_source is not None

    @property
    def owns_index_query(self) -> bool:
        """Whether the layer selects entries itself."""
        return self.index_source == self.index


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """The lists of a configuration that decide the map; `ratios` covers the backbone only."""

    ratios: tuple[int, ...]
    kv: tuple[int, ...]
    index: tuple[int, ...]
    index_keys: tuple[int, ...] | None = None
    candidate: int | None = None
    engram: tuple[int, ...] = ()
    captured: tuple[int, ...] = ()


def build_layers(sources: Sources) -> tuple[LayerPlan, ...]:
    """Return V4.1's plan per backbone layer; raises `CheckpointError` for lists that contradict each other."""
    _check_lists(sources)
    layers = tuple(_plan(sources, i) for i in range(len(sources.ratios)))
    for layer in layers:
        _check_layer(layer, layers, sources)
    return layers


def build_v4_layers(ratios: Sequence[int], num_hash_layers: int) -> tuple[LayerPlan, ...]:
    """Return V4's plan per backbone layer: every layer with a ratio owns its entries, ratio 4 selects among them."""
    unknown = sorted(set(ratios) - {0, 4, 128})
    if unknown:
        raise CheckpointError(f"compress_ratios has {unknown[0]}; V4 knows 0, 4 and 128")
    return tuple(
        LayerPlan(
            index=i,
            mode=FULL if m else WINDOW,
            m=m,
            kv_source=i if m else None,
            index_source=i if m == 4 else None,
            hash_routed=i < num_hash_layers,
            rope="compress" if m else WINDOW,
            overlap=m == 4,
        )
        for i, m in enumerate(ratios)
    )


def build_stages(first: int, count: int) -> tuple[LayerPlan, ...]:
    """Return the plans of `count` draft stages, which only have windows and are numbered behind the backbone."""
    return tuple(LayerPlan(index=first + i, mode=WINDOW, m=0) for i in range(count))


def decoder_start(layers: Sequence[LayerPlan]) -> int:
    """Return the first layer whose entries stand for one token each; the number of layers if there is none.

    No layer from here on writes anything that later tokens read, except window rows.
    """
    return next((layer.index for layer in layers if layer.m == 1), len(layers))


def check_page_tokens(layers: Sequence[LayerPlan], page_tokens: int) -> None:
    """Raise `ConfigError` if a page of so many tokens would split a group of tokens that make one entry."""
    for layer in layers:
        if layer.m and page_tokens % layer.m:
            raise ConfigError(
                f"a page of {page_tokens} tokens splits the groups of {layer.m} tokens of layer {layer.index}"
            )


def _last(sources: Sequence[int], layer: int) -> int | None:
    return max((s for s in sources if s <= layer), default=None)


def _plan(sources: Sources, i: int) -> LayerPlan:
    m = sources.ratios[i]
    kv, index = (_last(sources.kv, i), _last(sources.index, i)) if m else (None, None)
    mode = WINDOW if not m else FULL if kv == i else REINDEX if index == i else REUSE
    candidate = sources.candidate
    return LayerPlan(
        index=i,
        mode=mode,
        m=m,
        kv_source=kv,
        index_source=index,
        is_candidate_source=i == candidate,
        uses_candidates=candidate is not None and i > candidate and index == i,
        has_engram=i in sources.engram,
        is_captured=i in sources.captured,
        rope="compress" if m else WINDOW,
    )


def _check_lists(sources: Sources) -> None:
    named = {
        "kv_source_layer_ids": sources.kv,
        "index_source_layer_ids": sources.index,
        "engram_layer_ids": sources.engram,
        "dspark_target_layer_ids": sources.captured,
    }
    count = len(sources.ratios)
    for name, ids in named.items():
        if list(ids) != sorted(set(ids)):
            raise CheckpointError(f"{name} is not strictly ascending")
        if ids and not 0 <= ids[0] <= ids[-1] < count:
            raise CheckpointError(f"{name} names a layer outside 0..{count - 1}")
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        bare = [i for i in named[name] if not sources.ratios[i]]
        if bare:
            raise CheckpointError(f"{name} names layer {bare[0]}, whose compress ratio is 0")
    if sources.index_keys is not None and sources.index_keys != sources.kv:
        raise CheckpointError("index_k_source_layer_ids differs from kv_source_layer_ids: keys come with the entries")
    if sources.candidate is not None and sources.candidate not in sources.index:
        raise CheckpointError(f"candidate_source_layer_id {sources.candidate} is not in index_source_layer_ids")


def _check_layer(layer: LayerPlan, layers: Sequence[LayerPlan], sources: Sources) -> None:
    if not layer.m:
        return
    if layer.kv_source is None or layer.index_source is None:
        raise CheckpointError(f"layer {layer.index} has compress ratio {layer.m} but no KV or index source before it")
    owner = layers[layer.kv_source]
    if owner.m != layer.m:
        raise CheckpointError(
            f"layer {layer.index} with compress ratio {layer.m} would read entries of layer {owner.index} "
            f"with ratio {owner.m}"
        )
    if layer.index_source < owner.index:
        raise CheckpointError(
            f"layer {layer.index} reads entries of layer {owner.index} by a selection of layer {layer.index_source}, "
            f"which is about other entries"
        )
    if layer.uses_candidates and sources.candidate is not None and layers[sources.candidate].m != layer.m:
        raise CheckpointError(
            f"layer {layer.index} (ratio {layer.m}) takes candidates of layer {sources.candidate} "
            f"(ratio {layers[sources.candidate].m})"
        )
    if layer.uses_candidates and layers[sources.candidate or 0].kv_source != layer.kv_source:
        raise CheckpointError(f"layer {layer.index} takes candidates of layer {sources.candidate} but its own entries")
