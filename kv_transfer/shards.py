"""Which bytes of a source's record become which bytes of the destination's, when tensor parallelism cuts them apart. Pure.

Rank r of t over H heads holds heads [r * H // t, + max(1, H // t)); with t > H a head has several holders. Total head
counts come from the model, never from local counts. The unit of the plan is (layer, key or value, head, token); what
lies together on both sides is moved together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from core.errors import LayoutMismatch
from core.kv import Component, KVLayout
from kv_transfer.api import I64

PLANES = 2
"""Key and value of each layer; a component of scales has them too."""
_MEANING = ("kind", "layers", "head_dim", "elem", "capacity_tokens")


@dataclass(frozen=True, slots=True)
class Runs:
    """Byte runs inside one record: `source` and `target` offsets and sizes, three int64 arrays of equal length."""

    source: I64
    target: I64
    nbytes: I64


Take = Mapping[str, Runs]
"""What to read of one source, by component; a component that is not there is read from another rank, or not at all."""


def heads_of(rank: int, size: int, total: int) -> range:
    """Return the KV heads that a rank holds."""
    first = rank * total // size
    return range(first, first + max(1, total // size))


def assign(sources: Sequence[KVLayout], target: KVLayout, rank: int) -> list[Take]:
    """Return what destination rank `rank` reads of each source rank, so that every byte of `target` is read once.

    Of several holders of a head, or of a record that all ranks hold, one is chosen so that the ranks of a destination
    spread over them. Raises LayoutMismatch naming the first field that no choice can bridge.
    """
    if not sources:
        raise LayoutMismatch("there is no source to read KV from")
    takes: list[dict[str, Runs]] = [{} for _ in sources]
    for component in target.components:
        held = [_find(source, component) for source in sources]
        parts = _split_up(held, component, rank)
        for take, part in zip(takes, parts, strict=True):
            if part is not None and len(part.nbytes):
                take[component.name] = part
    return list(takes)


def is_whole(source: Component, target: Component) -> bool:
    """True if records of both hold the same bytes in the same order."""
    fields = (*_MEANING, "record_bytes", "heads", "first_head", "axes", "shards")
    return _total(source) == _total(target) and all(getattr(source, f) == getattr(target, f) for f in fields)


@lru_cache(maxsize=1024)
def pair_runs(source: Component, target: Component) -> Runs:
    """As `assign` for a lone source and one component."""
    part = _split_up([source], target, 0)[0]
    assert part is not None, "a lone source holds all or the layouts do not match"
    return part


def mismatch(path: str, source: object, target: object) -> LayoutMismatch:
    """Return the error that names where two layouts differ."""
    return LayoutMismatch(f"KV layouts differ at {path}: the source has {source}, the destination {target}")


def _find(source: KVLayout, target: Component) -> Component:
    found = next((component for component in source.components if component.name == target.name), None)
    if found is None:
        raise LayoutMismatch(f"KV layouts differ at components[{target.name}]: the source does not have it")
    for field in _MEANING:
        ours, theirs = getattr(target, field), getattr(found, field)
        if ours != theirs:
            raise mismatch(f"components[{target.name}].{field}", theirs, ours)
    return found


def _split_up(held: Sequence[Component], target: Component, rank: int) -> list[Runs | None]:
    whole = [i for i, source in enumerate(held) if is_whole(source, target)]
    if whole:
        size = np.array([target.record_bytes], np.int64)
        chosen = whole[rank % len(whole)]
        return [Runs(0 * size, 0 * size, size) if i == chosen else None for i in range(len(held))]
    if target.shards or any(source.shards for source in held):
        return _shard_runs(held, target)
    if target.heads:
        return _head_runs(held, target, rank)
    raise mismatch(f"components[{target.name}].record_bytes", held[0].record_bytes, target.record_bytes)


def _head_runs(held: Sequence[Component], target: Component, rank: int) -> list[Runs | None]:
    unit = _unit_bytes(target)
    for source in held:
        if _total(source) != _total(target):
            raise mismatch(f"components[{target.name}].total_heads", _total(source), _total(target))
        if _unit_bytes(source) != unit:
            raise mismatch(f"components[{target.name}].record_bytes", source.record_bytes, target.record_bytes)
    taken: list[list[int]] = [[] for _ in held]
    for head in _held(target):
        owners = [i for i, source in enumerate(held) if head in _held(source)]
        if not owners:
            raise mismatch(f"components[{target.name}].heads", [_held(source) for source in held], _held(target))
        taken[owners[rank % len(owners)]].append(head)
    return [_runs_of(source, target, heads, unit) if heads else None for source, heads in zip(held, taken, strict=True)]


def _runs_of(source: Component, target: Component, heads: Sequence[int], unit: int) -> Runs:
    wanted = np.array(heads, np.int64)
    at = [_units(c, wanted - c.first_head) for c in (source, target)]
    order = np.argsort(at[1])
    first, second = at[0][order], at[1][order]
    fresh = np.ones(len(first), bool)
    fresh[1:] = (np.diff(first) != 1) | (np.diff(second) != 1)
    starts = np.flatnonzero(fresh)
    sizes = np.diff(np.append(starts, len(first)))
    return Runs(first[starts] * unit, second[starts] * unit, sizes * unit)


def _units(component: Component, heads: I64) -> I64:
    """Indices within a record of the units of these local heads: [layers * 2, heads, tokens], flat."""
    planes = np.arange(len(component.layers) * PLANES, dtype=np.int64)[:, None, None]
    tokens = np.arange(component.capacity_tokens, dtype=np.int64)[None, None, :]
    local, count = heads[None, :, None], component.capacity_tokens
    inner = local * count + tokens if component.axes == "HND" else tokens * component.heads + local
    return (planes * component.heads * count + inner).reshape(-1)


def _unit_bytes(component: Component) -> int:
    """Bytes of one head of one token in one plane."""
    units = len(component.layers) * PLANES * component.heads * component.capacity_tokens
    if not units or component.record_bytes % units:
        raise mismatch(f"components[{component.name}].record_bytes", component.record_bytes, f"{units} equal parts")
    return component.record_bytes // units


def _total(component: Component) -> int:
    return component.total_heads or component.heads


def _held(component: Component) -> range:
    return range(component.first_head, component.first_head + component.heads)


def _shard_runs(held: Sequence[Component], target: Component) -> list[Runs | None]:
    path = f"components[{target.name}].shards"
    totals = [shard.total for shard in target.shards]
    for component in (target, *held):
        if [shard.total for shard in component.shards] != totals:
            raise mismatch(path, [shard.total for shard in component.shards], totals)
        if sum(shard.nbytes for shard in component.shards) != component.record_bytes:
            raise mismatch(path, f"{component.record_bytes} bytes a record", "shards that fill it")
    runs: list[list[tuple[int, int, int]]] = [[] for _ in held]
    at = 0
    for index, want in enumerate(target.shards):
        have, end = want.first, want.first + want.nbytes
        while have < end:
            found = ((i, source.shards[index]) for i, source in enumerate(held))
            owner = next(((i, s) for i, s in found if s.first <= have < s.first + s.nbytes), None)
            if owner is None:
                raise mismatch(f"{path}[{index}]", f"no byte {have}", f"bytes {want.first}..{end}")
            i, shard = owner
            upto = min(end, shard.first + shard.nbytes)
            before = sum(s.nbytes for s in held[i].shards[:index])
            runs[i].append((before + have - shard.first, at, upto - have))
            at, have = at + upto - have, upto
    return [
        Runs(*(np.array(column, np.int64) for column in zip(*part, strict=True))) if part else None for part in runs
    ]
