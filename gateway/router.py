"""Places one attempt: hashes its pages, asks the index who holds them, lets the pure part choose a pair.

The stateful shell around `gateway.routing`; knows no streams and no retries. Event loop's thread only.
"""

import zlib
from dataclasses import dataclass, field

import numpy as np

from core.clock import Clock
from core.hashing import PageHasher, event_hash, image_pages
from core.ids import PageHash
from core.stream import PrefillTarget, Started
from core.worker import Registration
from gateway.directory import Directory, Member
from gateway.fleet import Ints
from gateway.generation import Prompt
from gateway.prefix_index import PrefixIndex
from gateway.resume import Output
from gateway.routing.job import NONE, Choice, Continuation, Job, RoutingRules, Shortage
from gateway.routing.pairs import choose_pair, choose_prefill
from gateway.routing.picker import Picker

MAX_HASHERS = 64
LEARNING = 0.2
"""Weight of the newest hand-over in the learned bytes per token."""


@dataclass(slots=True)
class Chain:
    """Page hashes of one sequence in one namespace, extended as it grows."""

    hashes: list[PageHash] = field(default_factory=list)
    events: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Work:
    """What is to be placed, over all attempts: written by its owner, read here."""

    prompt: Prompt
    output: Output
    chains: dict[bytes, Chain] = field(default_factory=dict)
    avoid_decode: set[Member] = field(default_factory=set)
    avoid_prefill: set[Member] = field(default_factory=set)

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV an attempt needs."""
        return len(self.prompt.token_ids) + len(self.output)


@dataclass(frozen=True, slots=True)
class Placed:
    """A pair, and what the choice was based on."""

    prefill: Member | None
    decode: Member
    choice: Choice
    page_hashes: tuple[PageHash, ...]
    uncached_tokens: int


class Router:
    """Knows the directory, the index and the cluster secret."""

    def __init__(
        self,
        *,
        directory: Directory,
        index: PrefixIndex,
        secret: bytes,
        rules: RoutingRules,
        picker: Picker,
        clock: Clock,
    ) -> None:
        self._directory = directory
        self._index = index
        self._secret = secret
        self._rules = rules
        self._picker = picker
        self._clock = clock
        self._hashers: dict[bytes, PageHasher] = {}
        self._continuation = Continuation()
        self._bytes_per_token = rules.kv_bytes_per_token

    def place(self, work: Work) -> Placed | Shortage:
        """Choose a pair, workers to avoid only if there is no other."""
        matched = self._matched(work)
        now = self._clock.now()
        found = self._choose(self._job(work, matched, avoid=True), now)
        if isinstance(found, Shortage) and (work.avoid_decode or work.avoid_prefill):
            found = self._choose(self._job(work, matched, avoid=False), now)
        if isinstance(found, Shortage):
            return found
        decode = self._directory.at(found.decode)
        prefill = None if found.prefill == NONE else self._directory.at(found.prefill)
        chain = self._chain(work, decode.registration)
        for member in (prefill, decode):
            if member is not None:
                self._index.expect(member.slot, chain.events, now)
        if not len(work.output):
            longest = int(matched.max(initial=0))
            self._continuation.observe(longest >= self._rules.continuing_share * work.num_tokens)
        return Placed(
            prefill=prefill,
            decode=decode,
            choice=found,
            page_hashes=tuple(chain.hashes),
            uncached_tokens=max(1, work.num_tokens - found.matched_prefill),
        )

    def place_prefill(self, work: Work, decode: Member) -> Member | None:
        """Choose another prefill worker for a request that stays where it is; None: there is none."""
        if not decode.alive:
            return None
        job = self._job(work, self._matched(work), avoid=True)
        slot = choose_prefill(
            self._directory.fleet, job, self._rules, self._picker, now=self._clock.now(), decode=decode.slot
        )
        return None if slot == NONE else self._directory.at(slot)

    def handed_over(self, started: Started, placed: Placed, num_tokens: int) -> None:
        """Learn from a finished hand-over what a token weighs."""
        moved = num_tokens - placed.choice.matched_decode
        if self._rules.kv_bytes_per_token > 0 or started.bytes_pulled <= 0 or moved <= 0:
            return
        seen = started.bytes_pulled / moved
        weight = LEARNING if self._bytes_per_token else 1.0
        self._bytes_per_token += weight * (seen - self._bytes_per_token)

    def _choose(self, job: Job, now: float) -> Choice | Shortage:
        return choose_pair(self._directory.fleet, job, self._rules, self._picker, now=now)

    def _job(self, work: Work, matched: Ints, *, avoid: bool) -> Job:
        session = work.prompt.session
        return Job(
            model=self._directory.names.models.find(work.prompt.model),
            num_tokens=work.num_tokens,
            max_output=max(1, work.prompt.stop.max_tokens - len(work.output)),
            matched=matched,
            exclude_prefill=_slots(work.avoid_prefill) if avoid else frozenset(),
            exclude_decode=_slots(work.avoid_decode) if avoid else frozenset(),
            session=zlib.crc32(session.encode()) | 1 if session else 0,
            continuing=self._continuation.share,
            bytes_per_token=self._bytes_per_token,
        )

    def _matched(self, work: Work) -> Ints:
        """[slots] leading tokens that each worker holds, over all fingerprints of the model."""
        fleet = self._directory.fleet
        matched = np.zeros(fleet.capacity, dtype=np.int64)
        self._index.expire(self._clock.now())
        for group in self._directory.groups(work.prompt.model):
            events = self._chain(work, group).events
            own = fleet.fingerprint == self._directory.names.fingerprints.find(group.fingerprint)
            matched[own] = self._index.match(events, fleet.capacity)[own] * group.page_tokens
        return matched

    def _chain(self, work: Work, registration: Registration) -> Chain:
        chain = work.chains.setdefault(registration.namespace, Chain())
        size = registration.page_tokens
        done = len(chain.hashes)
        if work.num_tokens // size > done:
            hasher = self._hasher(registration)
            prompt = work.prompt
            tokens = (*prompt.token_ids, *work.output.tokens) if len(work.output) else prompt.token_ids
            previous = chain.hashes[-1] if done else hasher.root(prompt.tenant, prompt.cache_salt)
            spans = [(image.start, image.end, image.digest) for image in prompt.images]
            images = image_pages(spans, size, done, len(tokens) // size - done)
            new = hasher.extend(previous, tokens[done * size :], images)
            chain.hashes.extend(new)
            chain.events.extend(map(event_hash, new))
        return chain

    def _hasher(self, registration: Registration) -> PageHasher:
        hasher = self._hashers.get(registration.namespace)
        if hasher is None:
            if len(self._hashers) >= MAX_HASHERS:
                self._hashers.clear()
            hasher = PageHasher(self._secret, registration.namespace, registration.page_tokens)
            self._hashers[registration.namespace] = hasher
        return hasher


def target_of(member: Member | None) -> PrefillTarget | None:
    """Return a prefill worker's address as the decode worker needs it."""
    if member is None:
        return None
    told = member.registration
    return PrefillTarget(worker_id=told.worker_id, address=told.address, incarnation=told.incarnation)


def _slots(members: set[Member]) -> frozenset[int]:
    return frozenset(member.slot for member in members if member.alive)
