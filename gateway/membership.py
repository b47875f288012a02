"""What workers report, brought to directory, prefix index and links. Implements `core.rpc.membership.MembershipService`.

Owns the snapshot fetches and the sweep of what ran out. Event loop's thread only; decides no routing.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from core.aio import Tasks
from core.clock import Clock
from core.errors import ConfigError, TandemError, UnknownModel
from core.hashing import namespace_field
from core.ids import Incarnation
from core.rpc.membership import Welcome
from core.rpc.proof import Proof
from core.worker import KvEventBatch, KvSnapshot, Load, Registration, Role
from gateway.directory import Directory, Member
from gateway.dispatch import decay_recent
from gateway.links import Links
from gateway.prefix_index import Applied, PrefixIndex

logger = logging.getLogger(__name__)

SWEEP_S = 0.25
LATE_S = 1.0
"""A sweep that comes later than this was held up, and so were the heartbeats: it removes nobody."""
SNAPSHOT_PAUSE_S = 0.5


class SnapshotFetcher(Protocol):
    """Asks workers for snapshots (`core.rpc.kv_index.KvIndexClient`)."""

    async def snapshot(self, address: str, timeout_s: float = 5.0) -> KvSnapshot:
        """Fetch one, or raise a `TandemError`."""
        ...


class Membership:
    """Everybody who joined, by incarnation."""

    def __init__(
        self,
        *,
        directory: Directory,
        index: PrefixIndex,
        links: Links,
        snapshots: SnapshotFetcher,
        proof: Proof,
        clock: Clock,
        tasks: Tasks,
        model: str,
        siblings: tuple[str, ...],
        on_joined: Callable[[Registration], None],
        tokenizer: str = "",
    ) -> None:
        """`tokenizer` is the SHA-256 of this gateway's tokenizer.json in hex; empty admits workers of any."""
        self._directory = directory
        self._index = index
        self._links = links
        self._snapshots = snapshots
        self._proof = proof
        self._clock = clock
        self._tasks = tasks
        self._model = model
        self._tokenizer = tokenizer
        self._siblings = siblings
        self._on_joined = on_joined
        self._members: dict[Incarnation, Member] = {}
        self._fetching: set[Incarnation] = set()

    # MembershipService

    def joined(self, registration: Registration) -> Welcome:
        if not self._proof.accepts(registration.incarnation, registration.secret_check):
            raise ConfigError(
                f"worker {registration.worker_id!r} does not know the cluster secret of this gateway; "
                "give every process the same secret file"
            )
        if self._model and registration.model != self._model:
            raise UnknownModel(
                f"this gateway serves {self._model!r}, worker {registration.worker_id!r} serves {registration.model!r}",
                param="model",
            )
        theirs = namespace_field(registration.namespace, "tokenizer")
        if self._tokenizer and theirs and theirs != self._tokenizer:
            # Its ids would mean other text: right tokens, wrong words.
            raise ConfigError(
                f"worker {registration.worker_id!r} has another tokenizer.json ({theirs[:12]}) than this gateway "
                f"({self._tokenizer[:12]}); give both the same model directory, or the worker a gateway of its own"
            )
        self._admit(registration)
        return Welcome(gateway=self._proof.incarnation, siblings=self._siblings, ttl_s=self._directory.ttl_s)

    def heartbeat(self, incarnation: Incarnation, load: Load) -> None:
        member = self._members.get(incarnation)
        if member is not None and not member.alive:
            # Its lease ran out on a stream that still stands: the host slept, or the network did.
            member = self._readmit(member)
        if member is not None:
            self._directory.heartbeat(member, load)

    def events(self, incarnation: Incarnation, batch: KvEventBatch) -> None:
        member = self._members.get(incarnation)
        if member is None or not member.alive:
            return
        if self._index.apply(member.slot, batch) is Applied.NEED_SNAPSHOT:
            self._fetch(member)

    def left(self, incarnation: Incarnation, reason: str) -> None:
        member = self._members.pop(incarnation, None)
        if member is None or not member.alive:
            return
        logger.info("worker %s left: %s", member.worker_id, reason)
        self._directory.deregister(member)
        self._index.drop(member.slot)
        self._links.departed(incarnation)

    def lost(self, incarnation: Incarnation) -> None:
        member = self._members.get(incarnation)
        if member is None:
            return
        if not member.alive:
            del self._members[incarnation]
            return
        logger.warning("the membership stream of worker %s broke", member.worker_id)
        self._directory.disconnected(member)

    # Time

    async def sweep(self) -> None:
        """Remove who is silent, again and again; an owned task."""
        last = self._clock.now()
        while True:
            await asyncio.sleep(SWEEP_S)
            now = self._clock.now()
            decay_recent(self._directory, now - last)
            if now - last < LATE_S:
                self._expire()
            self._links.sweep()
            self._index.expire(now)
            last = now

    def link_lost(self, worker: Registration) -> None:
        """The stream to a decode worker could not be kept: no new work until its next heartbeat."""
        member = self._members.get(worker.incarnation)
        if member is not None and member.alive:
            self._directory.suspect(member)

    # Book-keeping

    def _admit(self, registration: Registration) -> Member:
        member, replaced = self._directory.join(registration)
        if replaced is not None:
            self._members.pop(replaced.incarnation, None)
            self._links.replaced(replaced.incarnation)
            if replaced.slot != member.slot:
                self._index.drop(replaced.slot)
        self._members[registration.incarnation] = member
        self._index.add(member.slot, registration.incarnation, registration.num_pages)
        if registration.role is Role.DECODE:
            self._links.ensure(registration)
        self._on_joined(registration)
        self._fetch(member)
        logger.info(
            "worker %s joined: %s of %s at %s, fingerprint %s",
            registration.worker_id,
            registration.role.value,
            registration.model,
            registration.address,
            registration.fingerprint.hex()[:12],
        )
        return member

    def _readmit(self, member: Member) -> Member | None:
        try:
            return self._admit(member.registration)
        except TandemError as error:
            logger.warning("worker %s is not taken back: %s", member.worker_id, error.message)
            return None

    def _expire(self) -> None:
        for member in self._directory.expire():
            logger.warning("worker %s is gone: silent for %.1f s", member.worker_id, self._directory.ttl_s)
            self._index.drop(member.slot)
            self._links.expired(member.incarnation)
            if not member.connected:
                del self._members[member.incarnation]

    def _fetch(self, member: Member) -> None:
        if member.incarnation not in self._fetching:
            self._fetching.add(member.incarnation)
            self._tasks.spawn(self._fetch_snapshot(member), name=f"snapshot of {member.worker_id}")

    async def _fetch_snapshot(self, member: Member) -> None:
        """Fetch until the worker's pages are known exactly, or it is gone."""
        try:
            while member.alive:
                try:
                    snapshot = await self._snapshots.snapshot(member.registration.address)
                except TandemError as error:
                    logger.info("no snapshot of %s: %s", member.worker_id, error.message)
                else:
                    if not member.alive or self._index.apply_snapshot(member.slot, snapshot) is Applied.DONE:
                        return
                    if not self._index.is_waiting(member.slot):
                        return
                await asyncio.sleep(SNAPSHOT_PAUSE_S)
        finally:
            self._fetching.discard(member.incarnation)
