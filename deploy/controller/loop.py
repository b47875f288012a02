"""The controller: reads figures, decides, and tells the place. One task, one writer.

Growth is ordered at once; a pool shrinks by draining one chosen worker in the background. An order that the place
refuses is logged and counted, and decided anew at the next tick; a stale fence ends the controller.
"""

import asyncio
import logging
from collections.abc import Awaitable

from core.clock import Clock
from core.errors import TandemError
from deploy.actuators.api import Actuator, Instance, StaleFence
from deploy.autoscale.decide import Decision, Memory, PoolDecision, decide
from deploy.autoscale.signals import PoolCount, Rules
from deploy.controller.figures import WorkerFacts, workers_of
from deploy.controller.journal import Entry, Journal
from deploy.controller.meter import Meter, signals_of
from deploy.controller.metrics import ScalerMetrics
from deploy.controller.poll import FigureSource
from deploy.controller.victim import choose_victim

_LOG = logging.getLogger(__name__)


class Controller:
    """Owns the sizes of both pools of one cluster. `fence` is that of the lock it holds; 0 while it only advises."""

    def __init__(
        self,
        *,
        actuator: Actuator,
        source: FigureSource,
        rules: Rules,
        clock: Clock,
        fence: int,
        advisory: bool,
        journal: Journal,
        metrics: ScalerMetrics,
    ) -> None:
        self._actuator = actuator
        self._source = source
        self._rules = rules
        self._clock = clock
        self._fence = fence
        self._advisory = advisory
        self._journal = journal
        self._metrics = metrics
        self._meter = Meter()
        self._memory = Memory.fresh(clock.now())
        self._removals: dict[str, asyncio.Task[None]] = {}
        self.replaced: StaleFence | None = None
        """Set once another controller has taken over: this one must end."""

    async def run(self, interval_s: float) -> None:
        """Tick until cancelled; raises StaleFence once another controller has taken over."""
        while True:
            try:
                await self.tick()
            except StaleFence:
                raise
            except TandemError as error:
                # A place that cannot be asked just now, e.g. while its API server restarts: nothing is decided blindly.
                _LOG.warning("nothing is decided: %s", error.message)
                self._metrics.failed()
            if self.replaced is not None:
                raise self.replaced
            await asyncio.sleep(interval_s)

    async def tick(self) -> Decision:
        """Read, decide, write down, act. Failures of the place are logged, not raised."""
        instances = await self._actuator.list()
        gateways, age_s = await self._source.read()
        now = self._clock.now()
        self._meter = self._meter.add(now, gateways)
        signals = signals_of(self._meter, gateways, instances, now=now, age_s=age_s)
        before = self._memory
        decision, self._memory = decide(self._rules, before, signals)
        self._journal.write(
            Entry(
                fence=self._fence,
                advisory=self._advisory,
                rules=self._rules,
                memory=before,
                signals=signals,
                decision=decision,
            )
        )
        self._metrics.show(decision)
        if not self._advisory:
            workers = workers_of(gateways)
            # Decode first: prefilled KV without a decode place is waste.
            await self._act("decode", decision.decode, signals.decode, instances, workers)
            await self._act("prefill", decision.prefill, signals.prefill, instances, workers)
        return decision

    async def close(self) -> None:
        """Stop waiting for workers that leave; they leave all the same."""
        for task in self._removals.values():
            task.cancel()
        await asyncio.gather(*self._removals.values(), return_exceptions=True)

    async def _act(
        self,
        role: str,
        pool: PoolDecision,
        count: PoolCount,
        instances: tuple[Instance, ...],
        workers: dict[str, WorkerFacts],
    ) -> None:
        if pool.target > count.want:
            _LOG.info("%s: %d -> %d (%s, need %.2f)", role, count.want, pool.target, pool.reason, pool.need)
            # A held worker does not serve, but its place is taken: what is missing comes on top of it.
            held = sum(1 for i in instances if i.role == role and i.state == "held")
            await self._order(role, self._actuator.ensure(role, pool.target + held, fence=self._fence))
        elif pool.target < count.want and role not in self._removals:
            victim = choose_victim(role, instances, workers)
            if victim is not None:
                _LOG.info("%s: %d -> %d, %s leaves (need %.2f)", role, count.want, pool.target, victim, pool.need)
                task = asyncio.create_task(self._order(role, self._actuator.remove(victim, fence=self._fence)))
                self._removals[role] = task
                task.add_done_callback(lambda _: self._removals.pop(role, None))

    async def _order(self, role: str, order: Awaitable[None]) -> None:
        try:
            await order
        except StaleFence as error:
            self.replaced = error
        except TandemError as error:
            _LOG.warning("%s: %s", role, error.message)
            self._metrics.failed()
