"""Settings of one engine, and the capacity plan that follows from them.

Declared beside their owner, read by `core.config`. Knows no model and allocates nothing: `CapacityPlan` is plain
arithmetic over a layout, printed at start so that an operator sees what fits before anything is loaded.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta

from core.errors import ConfigError
from core.kv import Component, ComponentKind, KVLayout
from engine.cache.hit import ReuseKind, ReuseRule
from engine.images import ImageFacts

SINK_PAGES = 1
MIN_PAGES = 3
"""The SINK, one for a prompt and one for its output."""
REGION_SLACK_BYTES = 4096
"""Regions are rounded up to so many."""


class SpeculationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Draft tokens, for models that come with a drafter."""

    mode: Literal["auto", "off", "static", "confidence"] = "auto"
    """static: verify all drafts; confidence: as many as pay for their time; auto: static if the model has a drafter."""
    acceptance: Literal["shared_noise", "chain_rule"] = "shared_noise"
    """shared_noise: the very tokens of a run without drafts; chain_rule: the same distribution, other tokens."""


class GrammarConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Structured output."""

    threads: Annotated[int, Meta(ge=1)] = 2
    """Threads that compile grammars, and as many that make masks."""
    compile_timeout_s: Annotated[float, Meta(gt=0)] = 2.0
    """A request whose grammar takes longer is refused."""
    max_waiting: Annotated[int, Meta(ge=1)] = 256
    """Grammars that may wait to be compiled; more requests are answered with NoCapacity."""
    cached: Annotated[int, Meta(ge=1)] = 256
    """Compiled grammars that are kept, the least recently used forgotten first."""
    cached_chars: Annotated[int, Meta(ge=1)] = 8 << 20
    """Bound on the text of all kept grammars together."""


class GraphsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Decode steps that a GPU repeats from a recording, for models whose forward can be recorded."""

    enabled: bool = True
    """Record at start; off: every launch of every step is made by the host."""
    tiers: tuple[Annotated[int, Meta(ge=1)], ...] = ()
    """Numbers of rows that decode steps are padded to; none: 1, 2, 4, 8 ... and num_rows."""


class KernelsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Kernels of other packages in place of ours, for models on a GPU: deep_gemm, flash_mla, deep_select, tile_kernels."""

    force: tuple[str, ...] = ()
    """Use these packages for every op they have; the process does not start if one cannot be used."""
    forbid: tuple[str, ...] = ()
    """Never use these, not even for ops that a record shows to be faster."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the scheduler and the runner are told. Token counts are per engine, times are seconds."""

    page_tokens: Annotated[int, Meta(ge=1, le=4096)] = 16
    """Tokens per page; equal on prefill and decode workers."""
    num_pages: Annotated[int, Meta(ge=0)] = 512
    """Pages of the pool, page 0 (the SINK) included. 0, on a GPU: as many as `memory_share` holds."""
    memory_share: Annotated[float, Meta(gt=0, lt=1)] = 0.8
    """Part of a GPU's memory that is free after the weights are there that the pool takes, if `num_pages` is 0. The rest
    is for the tensors of steps, and for other processes."""
    num_rows: Annotated[int, Meta(ge=1, le=65536)] = 32
    """Sequences that may hold a row at once."""
    chunk_tokens: Annotated[int, Meta(ge=1)] = 512
    """Budget of query tokens per step; decode rows count against it."""
    max_partial_prefills: Annotated[int, Meta(ge=1)] = 4
    """Prompts that may be half computed at the same time."""
    continuing_share: Annotated[float, Meta(gt=0, le=1)] = 0.75
    """Part of the budget that half-computed prompts may take while others wait."""
    oldest_share: Annotated[float, Meta(gt=0, le=1)] = 0.25
    """Part of the budget that the oldest half-computed prompt is sure of; the rest goes to the shortest first."""
    horizon_tokens: Annotated[int, Meta(ge=0)] = 16
    """Output tokens that every active sequence gets room for at admission."""
    finish_reserve_pages: Annotated[int, Meta(ge=0)] = 8
    """Cap on the extra reserve that lets the longest running sequence finish."""
    max_bypass: Annotated[int, Meta(ge=0)] = 32
    """Later sequences that may be admitted before a waiting one gets a reservation."""
    max_bypass_s: Annotated[float, Meta(ge=0)] = 2.0
    """Wait after which a sequence that was passed over gets a reservation."""
    max_preempts: Annotated[int, Meta(ge=1, le=200)] = 3
    """Retractions after which a sequence is pinned: it is chosen again only if all others are pinned too."""
    max_waiting: Annotated[int, Meta(ge=1)] = 1024
    """Sequences that may queue, prompts and bookings together; more are answered with NoCapacity."""
    prefix_cache: bool = True
    """Reuse pages of earlier sequences. Models with per-row state do so only if they can replay."""
    deterministic: bool = True
    """Decision A14: the same tokens whatever the batch, chunking or worker."""
    audit_every_steps: Annotated[int, Meta(ge=0)] = 0
    """Check every invariant each so many steps; 0 is never. A violation stops the process."""
    threads: Annotated[int, Meta(ge=1)] = 1
    """Intra-op threads of the runner."""
    speculation: SpeculationConfig = SpeculationConfig()
    grammar: GrammarConfig = GrammarConfig()
    graphs: GraphsConfig = GraphsConfig()
    kernels: KernelsConfig = KernelsConfig()
    warm_up: bool = True
    """On a GPU, run steps of all sizes at start, so that no request waits for a kernel to be compiled."""
    images: bool = True
    """Take images, if the model does."""
    image_cache_bytes: Annotated[int, Meta(ge=0)] = 256 << 20
    """Bound on encoded images that are kept for other requests."""


class TokenFacts(Protocol):
    """What the scheduler must know of a model; `engine.models.model.ModelFacts` is one."""

    @property
    def vocab_size(self) -> int:
        """Token ids are 0 .. vocab_size - 1."""
        ...

    @property
    def max_positions(self) -> int:
        """Longest sequence, prompt and output."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text unless the request ignores them."""
        ...

    @property
    def reuse(self) -> ReuseRule:
        """What cached prefixes are good for, and which rows of a prompt run through every layer."""
        ...

    @property
    def images(self) -> ImageFacts | None:
        """What images the model takes; None: none."""
        ...


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """What fits: pages, rows and bytes, and the longest sequence that can ever run here."""

    page_tokens: int
    usable_pages: int
    num_rows: int
    bytes_per_page: int
    bytes_per_row: int
    max_tokens_total: int
    """Bound on prompt + first output token at ingress: context length or pool, the smaller."""
    max_pages: int
    """Columns of a page table."""
    limited_by: str
    """``context`` or ``pages``."""
    components: tuple[str, ...] = ()
    """Every component of the layout with its bytes, for people."""

    @property
    def total_bytes(self) -> int:
        """KV memory of the engine."""
        return (self.usable_pages + SINK_PAGES) * self.bytes_per_page + self.num_rows * self.bytes_per_row

    def lines(self) -> list[str]:
        """Return the plan for people, one fact per line."""
        mib = 1 << 20
        in_pages = (self.usable_pages + SINK_PAGES) * self.bytes_per_page / mib
        in_rows = self.num_rows * self.bytes_per_row / mib
        return [
            f"pages: {self.usable_pages} of {self.page_tokens} tokens, {self.bytes_per_page} B each, {in_pages:.1f} MiB",
            f"rows: {self.num_rows}, {self.bytes_per_row} B each, {in_rows:.1f} MiB",
            *self.components,
            f"longest sequence: {self.max_tokens_total} tokens, limited by {self.limited_by}",
            f"KV memory: {self.total_bytes / mib:.1f} MiB",
        ]


def fitting_pages(layout: KVLayout, free_bytes: int, share: float) -> int:
    """Return how many pages a share of free memory holds beside the rows; `layout` is of any number of pages.

    Raises `ConfigError` if that is none.
    """
    paged = sum(c.stride_bytes for c in layout.components if c.kind is ComponentKind.PAGED)
    rows = sum(c.stride_bytes * c.num_records for c in layout.components if c.kind is not ComponentKind.PAGED)
    pages = (int(free_bytes * share) - rows - len(layout.components) * REGION_SLACK_BYTES) // max(1, paged)
    if pages < MIN_PAGES:
        raise ConfigError(
            f"{share:g} of the {free_bytes / 2**20:.1f} MiB that are free on the GPU hold no pool: rows take "
            f"{rows / 2**20:.1f} MiB, a page {paged / 2**20:.3f}; lower engine.num_rows or raise engine.memory_share",
            param="engine.num_pages",
        )
    return pages


def plan_capacity(config: EngineConfig, layout: KVLayout, max_positions: int) -> CapacityPlan:
    """Return what fits, or raise `ConfigError` naming the setting that must change."""
    size = config.page_tokens
    if layout.page_tokens != size:
        raise ConfigError(f"the KV layout has pages of {layout.page_tokens} tokens, page_tokens is {size}")
    if config.chunk_tokens < size:
        raise ConfigError(f"chunk_tokens = {config.chunk_tokens} is smaller than one page; set it to {size} or more")
    if config.num_pages < MIN_PAGES:
        raise ConfigError(
            f"engine.num_pages = {config.num_pages} is no pool; set it to {MIN_PAGES} or more (0, as many as fit, is for a "
            "GPU only)",
            param="engine.num_pages",
        )
    usable = config.num_pages - SINK_PAGES
    for component in layout.components:
        wanted = config.num_pages if component.kind is ComponentKind.PAGED else config.num_rows
        if component.num_records < wanted:
            raise ConfigError(
                f"component {component.name} has {component.num_records} records, the engine needs {wanted}"
            )
    if max_positions < 2:
        raise ConfigError(f"the model's context of {max_positions} tokens leaves no room for an output token")
    by_pages = usable * size
    if by_pages < 2:
        raise ConfigError(f"num_pages = {config.num_pages} leaves no room for a prompt and an output token")
    return CapacityPlan(
        page_tokens=size,
        usable_pages=usable,
        num_rows=config.num_rows,
        bytes_per_page=sum(c.record_bytes for c in layout.components if c.kind is ComponentKind.PAGED),
        bytes_per_row=sum(c.record_bytes for c in layout.components if c.kind is not ComponentKind.PAGED),
        max_tokens_total=min(max_positions, by_pages),
        max_pages=min(usable, -(-max_positions // size)),
        limited_by="pages" if by_pages < max_positions else "context",
        components=tuple(_described(component) for component in layout.components),
    )


def check_image_room(config: EngineConfig, facts: TokenFacts) -> None:
    """Raise `ConfigError` if images are taken and the largest one does not fit into a chunk."""
    if not config.images or facts.images is None:
        return
    largest = facts.images.rules.max_tokens
    if config.chunk_tokens < largest:
        raise ConfigError(
            f"chunk_tokens = {config.chunk_tokens} is smaller than an image, which may have {largest} tokens and is"
            f" computed in one piece; set it to {largest} or more, or images to false"
        )


def reuse_rule(config: EngineConfig, layout: KVLayout, facts: TokenFacts) -> ReuseRule:
    """Return the model's rule as it applies here; raises `ConfigError` if pages or chunks are too small for it.

    It holds without a prefix cache too: sequences may come from where there is one.
    """
    rule, size = facts.reuse, config.page_tokens
    if layout.has_row_state and rule.kind is ReuseKind.PAGES:
        return replace(rule, kind=ReuseKind.NONE)
    if not rule.replays:
        return rule
    if size % rule.align_tokens or rule.replay_tokens % rule.align_tokens:
        raise ConfigError(
            f"page_tokens = {size} and the {rule.replay_tokens} replayed tokens must be multiples of"
            f" {rule.align_tokens}, the tokens of one cached entry"
        )
    least = rule.replay_tokens + size
    if config.chunk_tokens < least:
        raise ConfigError(
            f"chunk_tokens = {config.chunk_tokens} is too small: behind a cached prefix {rule.replay_tokens} tokens are"
            f" computed again; set it to {least} or more (these and one page)"
        )
    return rule


def _described(component: Component) -> str:
    """Return a component's bytes per page or row; of packed records (no heads) also those of their parts."""
    owner = "page" if component.kind is ComponentKind.PAGED else "row"
    text = f"  {component.name}: {component.record_bytes} B per {owner}"
    if component.heads or not component.layers:
        return text
    # Parts are named kind.layer:bytes; neighbours of one kind and size are told together.
    named = [(label.partition(".")[0], label.rpartition(":")[2]) for label in component.layers]
    groups = [(kind, size, len(list(same))) for (kind, size), same in itertools.groupby(named)]
    return text + " = " + ", ".join(f"{kind} {count} x {size}" for kind, size, count in groups)
