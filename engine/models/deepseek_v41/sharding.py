"""Which part of which tensor belongs to a rank: a pure plan over the inventory. Reads nothing.

Experts and n-gram tables are divided over all ranks. Attention is either whole on every rank (each rank has requests of
its own) or divided by heads; compressed entries, window rows and the selection of entries are never divided.
"""

from collections.abc import Iterable, Iterator
from math import lcm

import msgspec

from core.errors import ConfigError
from engine.models.deepseek_v41.config import V41Config
from engine.models.deepseek_v41.inventory import TensorSpec

_TABLE_ROWS = 256
"""Tables are divided as if padded to a multiple of this many rows (and of the ranks)."""


class Slice(msgspec.Struct, frozen=True):
    """A range along one dimension; scales have a range of their own."""

    dim: int
    start: int
    stop: int


class Shard(msgspec.Struct, frozen=True):
    """A rank's part of one tensor; `part` None: all of it."""

    name: str
    part: Slice | None


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """One process among those that hold a model together."""

    rank: int
    size: int
    split_heads: bool = False
    """Attention is divided by heads over the same ranks."""


def shards(config: V41Config, specs: Iterable[TensorSpec], ranks: Ranks) -> Iterator[Shard]:
    """Yield what a rank holds; tensors of which it holds nothing are left out. Raises `ConfigError` if ranks do not fit."""
    check_ranks(config, ranks)
    for spec in specs:
        part = _part(config, spec, ranks)
        if part is None or part.start < part.stop:
            yield Shard(spec.name, part)


def check_ranks(config: V41Config, ranks: Ranks) -> None:
    """Raise `ConfigError` if the model cannot be divided so."""
    if not 0 <= ranks.rank < ranks.size:
        raise ConfigError(f"rank {ranks.rank} is outside 0..{ranks.size - 1}")
    counts = [("routed experts", config.moe.num_experts)]
    if config.dspark is not None:
        counts.append(("draft experts", config.dspark.num_experts))
    if ranks.split_heads:
        counts.append(("output groups", config.o_groups))
    for what, count in counts:
        if count % ranks.size:
            raise ConfigError(f"{count} {what} do not divide over {ranks.size} ranks")
    rows, columns = config.quant.block
    heads = config.num_heads * config.head_dim // ranks.size
    outputs = config.o_groups * config.o_lora_rank // ranks.size
    if ranks.split_heads and (heads % rows or outputs % rows or outputs % columns):
        raise ConfigError(f"the scales of attention weights do not divide over {ranks.size} ranks")


def local_experts(num_experts: int, ranks: Ranks) -> range:
    """Return the experts of a rank."""
    each = num_experts // ranks.size
    return range(ranks.rank * each, (ranks.rank + 1) * each)


def table_rows(num_rows: int, ranks: Ranks) -> range:
    """Return the rows of an n-gram table that a rank holds; the last ranks may have fewer."""
    unit = lcm(_TABLE_ROWS, ranks.size)
    each = -(-num_rows // unit) * unit // ranks.size
    return range(min(ranks.rank * each, num_rows), min((ranks.rank + 1) * each, num_rows))


def _part(config: V41Config, spec: TensorSpec, ranks: Ranks) -> Slice | None:
    parts = spec.name.split(".")
    if "experts" in parts:
        expert = int(parts[parts.index("experts") + 1])
        draft = config.dspark is not None and parts[0] == "mtp"
        count = config.dspark.num_experts if draft and config.dspark else config.moe.num_experts
        return None if expert in local_experts(count, ranks) else Slice(0, 0, 0)
    if "engram" in parts and "embed" in parts:
        rows = table_rows(spec.shape[0], ranks)
        return Slice(0, rows.start, rows.stop)
    dim = _head_dim_of(parts) if ranks.split_heads else None
    if dim is None:
        return None
    each = spec.shape[dim] // ranks.size
    return Slice(dim, ranks.rank * each, (ranks.rank + 1) * each)


def _head_dim_of(parts: list[str]) -> int | None:
    """Return the dimension of a tensor that runs over heads or groups of heads, None if there is none."""
    if "attn" not in parts or "indexer" in parts or parts[0] == "vision":
        return None
    if parts[-1] == "attn_sink" or "wq_b" in parts or "wo_a" in parts:
        return 0
    return 1 if "wo_b" in parts else None
