"""The last routing decisions with their cost tables, for `/debug/why?request_id=`. Bounded; decides nothing."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from gateway.directory import Directory
from gateway.fleet import Ints
from gateway.routing.job import NONE, Choice

KEPT = 1024
SHOWN = 16
"""Candidates of a kind in an answer, the cheapest first."""


class _Decision(msgspec.Struct, frozen=True):
    choice: Choice
    reason: str
    num_tokens: int
    names: Sequence[str]
    """Of the slots, as of then: slots are reused."""


class Decisions:
    """By request id, the newest last; a request that was placed again shows every placement that is still kept."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._by_request: OrderedDict[str, list[_Decision]] = OrderedDict()

    def note(self, request_id: str, choice: Choice, reason: str, num_tokens: int, directory: Directory) -> None:
        """Keep one decision."""
        decision = _Decision(choice, reason, num_tokens, directory.slot_names)
        known = self._by_request.get(request_id)
        if known is not None:
            known.append(decision)
            return
        self._by_request[request_id] = [decision]
        if len(self._by_request) > self._kept:
            self._by_request.popitem(last=False)

    def why(self, request_id: str) -> list[Mapping[str, Any]]:
        """Return every kept placement of the request, or of its samples (`<id>-<n>`), in order."""
        return [
            _describe(one)
            for name, decisions in tuple(self._by_request.items())
            if name == request_id or name.rpartition("-")[0] == request_id
            for one in tuple(decisions)
        ]


def _describe(one: _Decision) -> Mapping[str, Any]:
    choice, table, names = one.choice, one.choice.table, one.names
    about: dict[str, Any] = {
        "prefill": None if choice.prefill == NONE else names[choice.prefill],
        "decode": names[choice.decode],
        "reason": one.reason,
        "num_tokens": one.num_tokens,
        "matched_prefill": choice.matched_prefill,
        "matched_decode": choice.matched_decode,
        "predicted_wait_s": round(choice.wait_s, 6),
        "predicted_cost_s": round(choice.seconds, 6),
    }
    if table is None:
        return about
    parts = {name: np.asarray(getattr(table, name)) for name in ("queue_s", "compute_s", "horizon_s", "move_s")}
    total = sum(parts.values(), np.zeros(len(table.prefill)))
    figures = {
        **parts,
        "total_s": total,
        "matched": table.matched,
    }
    about["prefill_candidates"] = _rows(table.prefill, figures, np.argsort(total), names)
    slow = {"slow_down_s": table.slow_s, "matched": table.held}
    about["decode_candidates"] = _rows(table.decode, slow, np.argsort(table.slow_s), names)
    return about


def _rows(
    slots: Sequence[int] | Ints, figures: Mapping[str, Any], order: Sequence[int] | Ints, names: Sequence[str]
) -> list[Mapping[str, Any]]:
    return [
        {"worker": names[int(slots[row])], **{name: round(float(values[row]), 6) for name, values in figures.items()}}
        for row in order[:SHOWN]
    ]
