"""All links of this gateway process to decode workers: opened when a worker joins, ended when it is gone.

Owns the links' tasks and mints handles. Decides nothing about requests. Event loop's thread only.
"""

import asyncio
from collections.abc import Callable, Iterator

from core.aio import Tasks
from core.clock import Clock
from core.errors import TandemError, WorkerLost
from core.ids import Handle, Incarnation
from core.worker import Registration
from gateway.worker_link import LinkRules, Opener, WorkerLink


class Links:
    """One `WorkerLink` per incarnation."""

    def __init__(
        self,
        *,
        gateway: Incarnation,
        opener: Opener,
        clock: Clock,
        rules: LinkRules,
        silence_s: float,
    ) -> None:
        self._gateway = gateway
        self._opener = opener
        self._clock = clock
        self._rules = rules
        self._silence_s = silence_s
        self._tell_lost: Callable[[Registration], None] = lambda _: None
        self._links: dict[Incarnation, tuple[WorkerLink, asyncio.Task[None]]] = {}
        self._tasks = Tasks()
        self._handles = 0
        self._closing = False

    def on_lost(self, tell: Callable[[Registration], None]) -> None:
        """Call `tell` whenever a link could not be kept up."""
        self._tell_lost = tell

    def fresh_handle(self) -> Handle:
        """Return a handle never used before by this gateway incarnation."""
        self._handles += 1
        return Handle(self._handles)

    def ensure(self, worker: Registration) -> WorkerLink:
        """Return the link to this incarnation, opening one if there is none or it is over."""
        known = self._links.get(worker.incarnation)
        if known is not None and known[0].error is None:
            known[0].expired = known[0].departed = False
            return known[0]
        link = WorkerLink(worker, gateway=self._gateway, opener=self._opener, clock=self._clock, rules=self._rules)
        task = self._tasks.spawn(self._keep(link), name=f"link to {worker.worker_id}")
        self._links[worker.incarnation] = (link, task)
        return link

    async def _keep(self, link: WorkerLink) -> None:
        try:
            await link.run()
        finally:
            current = self._links.get(link.worker.incarnation)
            if current is not None and current[0] is link:
                del self._links[link.worker.incarnation]
                if not self._closing and not link.departed:
                    self._tell_lost(link.worker)

    def expired(self, incarnation: Incarnation) -> None:
        """Its lease ran out. Requests go on as long as it talks on its stream."""
        if incarnation in self._links:
            self._links[incarnation][0].expired = True

    def departed(self, incarnation: Incarnation) -> None:
        """It said goodbye; what it still runs goes on."""
        if incarnation in self._links:
            self._links[incarnation][0].departed = True

    def replaced(self, incarnation: Incarnation) -> None:
        """Another process has taken the worker's name: this incarnation is dead."""
        self._end(incarnation, WorkerLost("the decode worker was restarted"))

    def sweep(self) -> None:
        """Lose the workers that are silent on both sides; end the links of departed ones that have nothing left."""
        now = self._clock.now()
        for link in self:
            incarnation, name = link.worker.incarnation, link.worker.worker_id
            if link.expired and now - link.last_frame_at >= self._silence_s:
                self._end(incarnation, WorkerLost(f"decode worker {name} has been silent too long"))
            elif link.departed and not link.num_open:
                self._end(incarnation, WorkerLost(f"decode worker {name} has left"))

    def _end(self, incarnation: Incarnation, error: TandemError) -> None:
        if incarnation in self._links:
            link, task = self._links.pop(incarnation)
            link.lose(error)
            task.cancel()

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[WorkerLink]:
        return iter([link for link, _ in self._links.values()])

    async def close(self) -> None:
        """End every stream; open handles fail with `WorkerLost`."""
        self._closing = True
        await self._tasks.close()
