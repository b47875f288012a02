"""Checks of a page pool's invariants I1 (the states partition the pool) and I2 (conservation).

Reads a view and recomputes everything from the state array; never used on the hot path.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.cache.page_state import NOBODY, OWNED_STATES, PageIndex, Pages, PageState
from engine.events import SeqId


@dataclass(frozen=True, slots=True)
class PoolView:
    """What a pool believes of itself."""

    states: npt.NDArray[np.uint8]  # [num_pages]
    owners: npt.NDArray[np.int64]  # [num_pages], -1 for nobody
    counts: tuple[int, ...]  # per PageState
    free: Pages
    fenced: tuple[tuple[int, PageIndex], ...]  # (fence, pages)
    retired: int


def audit_pool(
    view: PoolView, owned: Mapping[SeqId, Iterable[int]] | None, tree_pages: Iterable[int] | None
) -> list[str]:
    """Return one sentence per violation; see `PagePool.audit`."""
    found: list[str] = []
    for state in PageState:
        real = int(np.count_nonzero(view.states == state))
        if real != view.counts[state]:
            found.append(f"I2 {view.counts[state]} pages are counted as {state.name}, {real} are in that state")
    if view.states[0] != PageState.SINK or np.count_nonzero(view.states == PageState.SINK) != 1:
        found.append("I1 page 0, and only page 0, must be the SINK")
    found += _compare(view, "the free list", view.free.tolist(), PageState.FREE)
    fenced = [page for _, pages in view.fenced for page in pages.tolist()]
    found += _compare(view, "the fence list", fenced, PageState.FENCED)
    if any(fence <= view.retired for fence, _ in view.fenced):
        found.append(f"I1 a fence of step {view.retired} or before still holds pages")
    has_owner = view.owners != NOBODY
    for page in np.flatnonzero(has_owner != np.isin(view.states, OWNED_STATES)).tolist():
        name = PageState(int(view.states[page])).name
        found.append(f"I1 page {page} is {name} and has owner {int(view.owners[page])}")
    if tree_pages is not None:
        found += _compare(view, "the tree", tree_pages, PageState.TREE)
    if owned is not None:
        found += _audit_owned(view, owned)
    return found


def _compare(view: PoolView, holder: str, pages: Iterable[int], state: PageState) -> list[str]:
    listed = [int(page) for page in pages]
    real = set(np.flatnonzero(view.states == state).tolist())
    found: list[str] = []
    if len(set(listed)) != len(listed):
        found.append(f"I1 {holder} names a page twice")
    if extra := sorted(set(listed) - real):
        found.append(f"I1 {holder} holds pages {extra} that are not {state.name}")
    if missing := sorted(real - set(listed)):
        found.append(f"I1 pages {missing} are {state.name} but not in {holder}")
    return found


def _audit_owned(view: PoolView, owned: Mapping[SeqId, Iterable[int]]) -> list[str]:
    live = np.isin(view.states, (PageState.PRIVATE, PageState.LOADING, PageState.LANDING))
    real = {page: int(view.owners[page]) for page in np.flatnonzero(live).tolist()}
    claimed: dict[int, int] = {}
    found: list[str] = []
    for owner, pages in owned.items():
        for page in map(int, pages):
            if page in claimed:
                found.append(f"I1 page {page} is held by sequences {claimed[page]} and {owner}")
            claimed[page] = owner
    for page, owner in claimed.items():
        if real.get(page) != owner:
            found.append(f"I1 sequence {owner} holds page {page}, which is not its own")
    for page, owner in real.items():
        if page not in claimed:
            found.append(f"I2 page {page} of sequence {owner} is held by nobody (leak)")
    return found
