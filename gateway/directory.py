"""Which workers exist, and what is known of each: registration, load, lease, breaker, our own dispatches.

Pure state over an injected clock, used by the event loop's thread. It opens no connection and picks no worker; it
keeps `gateway.fleet.Fleet` in step with what it is told. A worker is *gone* when it deregistered or its lease ran
out; a worker whose membership stream broke gets no new work but keeps its place until the lease ends.
"""

import zlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from core.clock import Clock
from core.errors import NamespaceMismatch, NoCapacity
from core.ids import Incarnation, WorkerId
from core.lifecycle import State
from core.worker import Load, Registration, Role
from gateway.breaker import Breaker, BreakerRules
from gateway.fleet import MODES, Fleet
from gateway.routing.calibration import PrefillCosts

RECENT_HALF_LIFE_S = 60.0
"""How fast the long-term load of a worker forgets."""
ANY_TRANSPORT = "auto"
MAX_TRANSPORTS = 63
FORGET_BREAKER_S = 600.0
"""A name not seen for this long loses its breaker."""


@dataclass(slots=True, eq=False)
class Member:
    """One live incarnation of a worker. `slot` is its index in the fleet while `alive`."""

    slot: int
    registration: Registration
    breaker: Breaker
    lease_until: float
    connected: bool = True
    """Its membership stream stands."""
    suspected: bool = False
    """Its request stream was lost; the next heartbeat clears it."""
    alive: bool = True
    load: Load | None = None
    draining: bool = False
    prompts: dict[object, float] = field(default_factory=dict)
    """Prompts of ours that it has not computed yet, in order: predicted seconds by their receipt."""
    computed_at: float = 0.0
    """When it last finished one of ours."""

    @property
    def takes_work(self) -> bool:
        """Connected and READY by its last report."""
        is_ready = self.load is not None and self.load.state is State.READY
        return is_ready and self.connected and not self.suspected and not self.draining

    @property
    def worker_id(self) -> WorkerId:
        """Name of the worker."""
        return self.registration.worker_id

    @property
    def incarnation(self) -> Incarnation:
        """The process behind the name."""
        return self.registration.incarnation


class Interning:
    """Small numbers for strings and bytes that are only compared. Bounded by the caller's set of names."""

    def __init__(self) -> None:
        self._codes: dict[str | bytes, int] = {}

    def code(self, name: str | bytes) -> int:
        """Return the number of `name`, minting one (from 1) at first sight."""
        return self._codes.setdefault(name, len(self._codes) + 1)

    def find(self, name: str | bytes) -> int:
        """Return the number of `name`, or 0 if it was never seen."""
        return self._codes.get(name, 0)


@dataclass(slots=True)
class _Names:
    models: Interning = field(default_factory=Interning)
    fingerprints: Interning = field(default_factory=Interning)
    domains: Interning = field(default_factory=Interning)
    kinds: Interning = field(default_factory=Interning)
    transports: Interning = field(default_factory=Interning)


class Directory:
    """All members of the cluster as this gateway process sees them."""

    def __init__(
        self,
        clock: Clock,
        *,
        ttl_s: float = 3.0,
        max_workers: int = 4096,
        mixed_fingerprints: bool = False,
        breaker: BreakerRules | None = None,
    ) -> None:
        self._clock = clock
        self.ttl_s = ttl_s
        self._max_workers = max_workers
        self._mixed = mixed_fingerprints
        self._rules = breaker or BreakerRules()
        self.fleet = Fleet.empty(16)
        self.names = _Names()
        self.costs = PrefillCosts()
        self._members: dict[WorkerId, Member] = {}
        self._slots: list[Member | None] = [None] * 16
        self.slot_names: tuple[str, ...] = ()  # a new tuple whenever that changes, so that it may be kept
        self._breakers: dict[WorkerId, tuple[Breaker, float]] = {}
        self._groups: dict[tuple[str, bytes], list[Member]] = {}
        self._ranks: dict[str, set[Member]] = {}

    def now(self) -> float:
        """Return the time of this directory's clock."""
        return self._clock.now()

    # What workers say

    def join(self, registration: Registration) -> tuple[Member, Member | None]:
        """Admit a worker; return it and the older incarnation it replaces, if any.

        The same incarnation joining again (a stream that was re-established) keeps its slot and load.
        Raises `NamespaceMismatch` for a foreign fingerprint and `NoCapacity` for a name that is in use.
        """
        now = self._clock.now()
        old = self._members.get(registration.worker_id)
        if old is not None and old.incarnation == registration.incarnation:
            old.connected = True
            old.lease_until = now + self.ttl_s
            self._publish(old)
            return old, None
        if old is not None and old.connected and old.lease_until > now:
            raise NoCapacity(
                f"a live worker already uses the name {registration.worker_id!r} at {old.registration.address}; "
                "give this one another id or stop the other",
                retry_after_s=self.ttl_s,
            )
        if not self._mixed:
            _check_fingerprint(registration, (one for one in self._members.values() if one is not old))
        if old is not None:
            self._remove(old)
        member = Member(
            slot=self._free_slot(),
            registration=registration,
            breaker=self._breaker(registration.worker_id, now),
            lease_until=now + self.ttl_s,
        )
        self._members[member.worker_id] = self._slots[member.slot] = member
        self.slot_names = _names_of(self._slots)
        self._groups.setdefault(_group(registration), []).append(member)
        self._ranks.setdefault(registration.group_id, set()).add(member)
        self._describe(member)
        self._publish(member)
        return member, old

    def heartbeat(self, member: Member, load: Load) -> None:
        """Renew the lease and take over the load."""
        if not member.alive:
            return
        member.load = load
        member.connected = True
        member.suspected = False
        member.lease_until = self._clock.now() + self.ttl_s
        fleet, slot = self.fleet, member.slot
        fleet.pages_free[slot] = load.pages_free + load.pages_evictable
        fleet.rate[slot] = load.prefill_tokens_per_s
        fleet.step_s[slot] = load.step_ms / 1000.0
        # Of what it reports, ours is known better, and already in the figures of this gateway.
        fleet.foreign_tokens[slot] = max(0.0, load.waiting_tokens - fleet.own_tokens[slot])
        live = load.running_requests + load.waiting_requests
        fleet.foreign_requests[slot] = max(0.0, live - fleet.own_requests[slot])
        self._publish(member)

    def disconnected(self, member: Member) -> None:
        """Its membership stream ended without a goodbye: no new work, and one failure for its breaker."""
        if member.alive and member.connected:
            member.connected = False
            self.failed(member)
            self._publish(member)

    def suspect(self, member: Member) -> None:
        """Something says it is dead: no new work before its next heartbeat, and one failure for its breaker."""
        if member.alive:
            member.suspected = True
            self.failed(member)

    def deregister(self, member: Member) -> None:
        """It says goodbye (drain): it is no member any more; what it still runs goes on."""
        if member.alive:
            self._remove(member)

    def expire(self) -> list[Member]:
        """Remove the members whose lease ran out and return them."""
        now = self._clock.now()
        lost = [member for member in self._members.values() if member.lease_until <= now]
        for member in lost:
            self._remove(member)
        for name, (_, last) in list(self._breakers.items()):
            if name not in self._members and now - last > FORGET_BREAKER_S:
                del self._breakers[name]
        return lost

    # What we learn of them

    def failed(self, member: Member, sent_at: float | None = None) -> None:
        """It failed at something that says the worker itself is ill; at a request of ours if `sent_at` is told."""
        member.breaker.failed(self._clock.now(), sent_at)
        self._publish(member)

    def succeeded(self, member: Member) -> None:
        """It did its part of a request."""
        if member.breaker.failures or member.breaker.probing:
            member.breaker.succeeded()
            self._publish(member)

    def undecided(self, member: Member) -> None:
        """A dispatch to it ended for reasons of its own."""
        if member.breaker.probing:
            member.breaker.undecided()
            self._publish(member)

    def dispatched(self, member: Member) -> None:
        """A request goes there now."""
        if member.breaker.failures:
            member.breaker.dispatched()
            self._publish(member)

    def draining(self, member: Member) -> None:
        """It refused work because it is going away; its next reports will say so too."""
        member.draining = True
        self._publish(member)

    # Questions

    def __iter__(self) -> Iterator[Member]:
        return iter(tuple(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def at(self, slot: int) -> Member:
        """Return the member of a slot that routing chose."""
        member = self._slots[slot]
        assert member is not None, f"slot {slot} is not in use"
        return member

    def find(self, worker_id: WorkerId) -> Member | None:
        """Return the live member of that name."""
        return self._members.get(worker_id)

    def of_role(self, role: Role, model: str = "") -> list[Member]:
        """Return the members of a role (and model), in no particular order."""
        return [
            member
            for member in self._members.values()
            if member.registration.role is role and (not model or member.registration.model == model)
        ]

    def groups(self, model: str) -> list[Registration]:
        """Return one registration for each fingerprint that serves the model."""
        return [members[0].registration for (name, _), members in self._groups.items() if name == model]

    # Book-keeping

    def _breaker(self, worker_id: WorkerId, now: float) -> Breaker:
        breaker = self._breakers[worker_id][0] if worker_id in self._breakers else Breaker(self._rules)
        self._breakers[worker_id] = (breaker, now)
        return breaker

    def _free_slot(self) -> int:
        if len(self._members) >= self._max_workers:
            raise NoCapacity(f"this gateway takes at most {self._max_workers} workers", retry_after_s=self.ttl_s)
        if None not in self._slots:
            self.fleet.grow(2 * len(self._slots))
            self._slots.extend([None] * len(self._slots))
        return self._slots.index(None)

    def _remove(self, member: Member) -> None:
        member.alive = False
        self.fleet.clear(member.slot)
        self._slots[member.slot] = None
        self.slot_names = _names_of(self._slots)
        del self._members[member.worker_id]
        group = self._groups[_group(member.registration)]
        group.remove(member)
        if not group:
            del self._groups[_group(member.registration)]
        self._breakers[member.worker_id] = (member.breaker, self._clock.now())
        ranks = self._ranks[member.registration.group_id]
        ranks.remove(member)
        if not ranks:
            del self._ranks[member.registration.group_id]
        elif member.registration.group_id:
            self._publish(next(iter(ranks)))

    def _describe(self, member: Member) -> None:
        fleet, slot, told = self.fleet, member.slot, member.registration
        fleet.clear(slot)
        fleet.used[slot] = True
        fleet.prefill[slot] = told.role is Role.PREFILL
        fleet.decode[slot] = told.role is Role.DECODE
        fleet.model[slot] = self.names.models.code(told.model)
        fleet.fingerprint[slot] = self.names.fingerprints.code(told.fingerprint)
        fleet.domain[slot] = self.names.domains.code(told.domain)
        fleet.transports[slot] = self._transport_bits(told.transports)
        fleet.mode[slot] = MODES.get(told.prefill_mode, MODES["remote"])
        fleet.key[slot] = zlib.crc32(told.worker_id.encode())
        # Nobody tells the hardware; equal software with an equal number of pages runs on equal machines.
        fleet.kind[slot] = self.names.kinds.code(b"%s %d %s" % (told.fingerprint, told.num_pages, told.role.encode()))
        self.costs.describe(fleet, slot)
        fleet.page_tokens[slot] = told.page_tokens
        fleet.max_tokens[slot] = told.max_tokens_total
        fleet.replay_tokens[slot] = told.replay_tokens
        fleet.num_pages[slot] = told.num_pages
        fleet.rows[slot] = told.num_rows
        fleet.pages_free[slot] = told.num_pages

    def _transport_bits(self, transports: tuple[str, ...]) -> int:
        """Return the set of names as bits; 0, which pairs with all, if it cannot be told: the handshake then decides."""
        codes = {self.names.transports.code(name) for name in transports}
        if ANY_TRANSPORT in transports or any(code >= MAX_TRANSPORTS for code in codes):
            return 0
        return sum(1 << code for code in codes)

    def _publish(self, member: Member) -> None:
        if not member.alive:
            return
        fleet, slot = self.fleet, member.slot
        if member.registration.group_id:
            _publish_group(fleet, self._ranks[member.registration.group_id], member.registration.dp_size)
        else:
            fleet.ready[slot] = member.takes_work
        fleet.probing[slot] = member.breaker.probing
        fleet.lease_until[slot] = member.lease_until
        fleet.open_until[slot] = member.breaker.open_until


def _names_of(slots: Iterable[Member | None]) -> tuple[str, ...]:
    return tuple("" if member is None else member.worker_id for member in slots)


def _group(registration: Registration) -> tuple[str, bytes]:
    return registration.model, registration.fingerprint


def _check_fingerprint(registration: Registration, others: Iterable[Member]) -> None:
    for other in others:
        told = other.registration
        if told.model == registration.model and told.fingerprint != registration.fingerprint:
            raise NamespaceMismatch(
                f"worker {registration.worker_id!r} has fingerprint {registration.fingerprint.hex()[:12]}, but "
                f"{told.worker_id!r} serves {told.model!r} here with {told.fingerprint.hex()[:12]}: model files, "
                "tokenizer, page size and version must be equal (or allow `membership.mixed_fingerprints`)"
            )


def _publish_group(fleet: Fleet, ranks: Collection[Member], size: int) -> None:
    """Ranks compute in lock step: a group takes work only while all of it does."""
    is_up = len(ranks) >= size and all(rank.takes_work for rank in ranks)
    fleet.ready[[rank.slot for rank in ranks]] = is_up
