"""Places one attempt whose pages are hashed already: asks the index, lets the pure part choose, keeps what it learns.

The stateful shell around `gateway.routing`, without text, tokens and streams, so that a simulation runs the same code
as the gateway. One thread.
"""

import zlib
from collections.abc import Sequence

import msgspec
import numpy as np

from core.clock import Clock
from gateway.debug_why import Decisions
from gateway.directory import Directory, Member
from gateway.fleet import Ints
from gateway.prefix_index import PrefixIndex, bits
from gateway.routing.calibration import LinkCosts
from gateway.routing.job import NONE, Choice, Continuation, Job, RoutingRules, Shortage
from gateway.routing.pairs import choose_pair, choose_prefill
from gateway.routing.picker import Picker
from gateway.routing.working_set import WorkingSet

FEW = 64
"""Slots up to which a list is faster."""
REASONS = ("prefix", "load", "new", "alone")
"""The longest prefix there is; less than that, for a shorter wait; nobody held any; no prefill worker."""


class HashedPages(msgspec.Struct, frozen=True):
    """Event hashes of a sequence's pages as the workers of one fingerprint name them."""

    fingerprint: bytes
    page_tokens: int
    events: Sequence[int]


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to be placed."""

    request_id: str
    model: str
    num_tokens: int
    max_output: int
    pages: Sequence[HashedPages]
    """Of every fingerprint that serves the model."""
    session: str = ""
    """As `begin` was told."""
    is_first: bool = True
    """No earlier attempt has brought output."""
    avoid_prefill: set[Member] = msgspec.field(default_factory=set)
    avoid_decode: set[Member] = msgspec.field(default_factory=set)


class Pair(msgspec.Struct, frozen=True):
    """Who computes the prompt (None: the decode worker itself), who decodes, and why."""

    prefill: Member | None
    decode: Member
    choice: Choice
    reason: str


class Placer:
    """Knows the directory and the index."""

    def __init__(
        self, *, directory: Directory, index: PrefixIndex, rules: RoutingRules, picker: Picker, clock: Clock
    ) -> None:
        self._directory = directory
        self._index = index
        self._rules = rules
        self._picker = picker
        self._clock = clock
        self._continuation = Continuation()
        self._sessions: dict[str, WorkingSet] = {}
        self.link = LinkCosts()
        self.decisions = Decisions()

    def place(self, query: Query) -> Pair | Shortage:
        """Choose a pair, workers to avoid only if there is no other."""
        now = self._clock.now()
        matched = self._matched(query, now)
        found = self._choose(self.job(query, matched, avoid=True), now)
        if isinstance(found, Shortage) and (query.avoid_decode or query.avoid_prefill):
            found = self._choose(self.job(query, matched, avoid=False), now)
        if isinstance(found, Shortage):
            return found
        decode = self._directory.at(found.decode)
        prefill = None if found.prefill == NONE else self._directory.at(found.prefill)
        longest = max(matched.tolist()) if len(matched) <= FEW else int(matched.max())
        reason = _reason(found, longest)
        for member in (prefill, decode):
            if member is not None:
                self._index.expect(member.slot, _events_for(query, member), now)
        if query.is_first:
            self._continuation.observe(longest >= self._rules.continuing_share * query.num_tokens)
        if query.session and query.model in self._sessions:
            self._sessions[query.model].settle(_session_hash(query.session), (prefill or decode).slot)
        self.decisions.note(query.request_id, found, reason, query.num_tokens, self._directory)
        return Pair(prefill, decode, found, reason)

    def place_prefill(self, query: Query, decode: Member) -> Member | None:
        """Choose another prefill worker for a request that stays at `decode`; None: there is none."""
        if not decode.alive:
            return None
        now = self._clock.now()
        job = self.job(query, self._matched(query, now), avoid=True)
        fleet = self._directory.fleet
        slot = choose_prefill(fleet, job, self._rules, self._picker, now=now, decode=decode.slot)
        return None if slot == NONE else self._directory.at(slot)

    # Sessions

    def begin(self, model: str, session: str, num_tokens: int) -> bool:
        """May this turn start? False: its session is new and the live ones fill the caches. True: `end` follows."""
        if not session or self._rules.working_set_share <= 0:
            return True
        known = self._sessions.setdefault(model, WorkingSet(self._rules.working_set_share))
        return known.begin(_session_hash(session), num_tokens, self._cache_tokens(model), self._clock.now())

    def end(self, model: str, session: str, num_tokens: int) -> None:
        """The turn is over; its context has `num_tokens`."""
        known = self._sessions.get(model)
        if session and known is not None:
            known.end(_session_hash(session), num_tokens, self._clock.now())

    @property
    def sessions(self) -> tuple[int, int]:
        """Live and waiting sessions."""
        return sum(one.live for one in self._sessions.values()), sum(one.waiting for one in self._sessions.values())

    def _cache_tokens(self, model: str) -> float:
        """Tokens that the caches of those who compute prompts hold together."""
        fleet = self._directory.fleet
        mine = fleet.used & (fleet.model == self._directory.names.models.find(model))
        pool = mine & fleet.prefill if (mine & fleet.prefill).any() else mine
        return float((fleet.num_pages * fleet.page_tokens)[pool].sum())

    # Jobs

    def _choose(self, job: Job, now: float) -> Choice | Shortage:
        return choose_pair(self._directory.fleet, job, self._rules, self._picker, now=now)

    def job(self, query: Query, matched: Ints, *, avoid: bool) -> Job:
        events = query.pages[0].events if query.pages else ()
        return Job(
            model=self._directory.names.models.find(query.model),
            num_tokens=query.num_tokens,
            max_output=query.max_output,
            matched=matched,
            exclude_prefill=_slots(query.avoid_prefill) if avoid else frozenset(),
            exclude_decode=_slots(query.avoid_decode) if avoid else frozenset(),
            session=_session_hash(query.session) if query.session else 0,
            head=events[min(1, len(events) - 1)] if events else 0,
            continuing=self._continuation.share,
            link=self.link,
            homes=self._homes(query),
            cache_share=self._rules.working_set_share,
        )

    def _homes(self, query: Query) -> dict[int, float]:
        known = self._sessions.get(query.model)
        return known.homes(_session_hash(query.session)) if query.session and known is not None else {}

    def _matched(self, query: Query, now: float) -> Ints:
        """[slots] leading tokens that each worker holds, over all fingerprints of the model."""
        fleet = self._directory.fleet
        matched = np.zeros(fleet.capacity, dtype=np.int64)
        self._index.expire(now)
        for pages in query.pages:
            code = self._directory.names.fingerprints.find(pages.fingerprint)
            if len(matched) > FEW:
                held = self._index.match(pages.events, fleet.capacity) * pages.page_tokens
                np.minimum(held, query.num_tokens, out=matched, where=fleet.fingerprint == code)
                continue
            view, fingerprint = matched.data, fleet.fingerprint.data
            for mask, length in self._index.prefixes(pages.events):
                tokens = min(length * pages.page_tokens, query.num_tokens)
                for slot in bits(mask):
                    if slot < len(matched) and fingerprint[slot] == code:
                        view[slot] = tokens
        return matched


def _reason(choice: Choice, longest: int) -> str:
    if choice.prefill == NONE:
        return "alone"
    if not longest:
        return "new"
    return "prefix" if choice.matched_prefill >= longest else "load"


def _events_for(query: Query, member: Member) -> Sequence[int]:
    told = member.registration.fingerprint
    for pages in query.pages:
        if pages.fingerprint == told:
            return pages.events
    return ()


def _session_hash(session: str) -> int:
    return zlib.crc32(session.encode()) | 1 << 32


def _slots(members: set[Member]) -> frozenset[int]:
    return frozenset(member.slot for member in members if member.alive) if members else frozenset()
