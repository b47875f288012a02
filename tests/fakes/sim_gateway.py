"""A gateway without sockets: the real orchestrator over simulated decode workers in this process."""

import asyncio
import random
from contextlib import asynccontextmanager

from core.clock import SystemClock
from core.ids import Incarnation, RequestId
from core.request import SamplingParams, StopRules
from core.worker import Role
from gateway.admission import Admission, Limits
from gateway.attempt import RetryBudget, RetryRules
from gateway.cluster import Cluster
from gateway.directory import Directory
from gateway.generation import Prompt
from gateway.leases import Leases
from gateway.links import Links
from gateway.metrics import GatewayMetrics
from gateway.orchestrator import Orchestrator
from gateway.prefix_index import PrefixIndex
from gateway.router import Router
from gateway.routing.job import RoutingRules
from gateway.routing.picker import Picker
from gateway.series import LoopMetrics
from gateway.worker_link import LinkRules
from tests.fakes.cluster import MODEL, SECRET, load, registration
from tests.fakes.sim_decode import LocalOpener, SimDecode

FAST = RetryRules(pause_s=0.001, start_wait_s=0.05, resume_wait_s=0.2, longest_pause_s=0.005)


class SimGateway:
    def __init__(self, *, retries=FAST, limits=None, routing=None, links=None):
        self.clock = SystemClock()
        self.directory = Directory(self.clock)
        self.index = PrefixIndex()
        self.opener = LocalOpener()
        self.metrics = GatewayMetrics(LoopMetrics())
        self.leases = Leases(self.clock)
        routing = routing or RoutingRules()
        self.links = Links(
            gateway=Incarnation("gateway"),
            opener=self.opener,
            clock=self.clock,
            rules=links or LinkRules(backoff_s=0.001, ack_s=0.01),
            silence_s=3.0,
        )
        self.links.on_lost(self._lost)
        router = Router(
            directory=self.directory,
            index=self.index,
            secret=SECRET,
            rules=routing,
            picker=Picker(random.Random(1)),
            clock=self.clock,
        )
        cluster = Cluster(
            directory=self.directory,
            router=router,
            links=self.links,
            clock=self.clock,
            retries=retries,
            routing=routing,
            budget=RetryBudget(retries),
            metrics=self.metrics,
            leases=self.leases,
        )
        self.admission = Admission(self.clock, limits or Limits(), leases=self.leases)
        self.orchestrator = Orchestrator(cluster, self.admission)
        self.workers = {}
        self.tasks = [asyncio.create_task(self._beat())]

    async def _beat(self):
        """Heartbeats of all workers that are not dead, faster than real ones."""
        while True:
            await asyncio.sleep(0.02)
            for member in self.directory:
                worker = self.opener.workers.get(member.registration.address)
                if worker is None or (not worker.dead and worker.incarnation == member.incarnation):
                    self.directory.heartbeat(member, load())
            self.directory.expire()
            self.links.sweep()

    def _lost(self, told):
        member = self.directory.find(told.worker_id)
        if member is not None and member.incarnation == told.incarnation:
            self.directory.suspect(member)

    def add_prefill(self, name, **changes):
        member, _ = self.directory.join(registration(name, Role.PREFILL, **changes))
        self.directory.heartbeat(member, load())
        self.orchestrator.registered(member.registration)
        return member

    def add_decode(self, name, worker=None, **changes):
        told = registration(name, Role.DECODE, **changes)
        member, _ = self.directory.join(told)
        self.directory.heartbeat(member, load())
        self.orchestrator.registered(told)
        worker = worker or SimDecode(told.incarnation)
        self.opener.workers[told.address] = worker
        self.workers[name] = worker
        self.tasks.append(asyncio.create_task(worker.run()))
        return worker

    def own_work(self):
        fleet = self.directory.fleet
        return float(abs(fleet.own_tokens).sum()), float(abs(fleet.own_requests).sum())

    async def close(self):
        await self.links.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@asynccontextmanager
async def sim_gateway(**settings):
    gateway = SimGateway(**settings)
    try:
        yield gateway
    finally:
        await gateway.close()


def prompt(tokens=(11, 12, 13), max_tokens=8, **changes):
    values = {
        "request_id": RequestId("req-1"),
        "model": MODEL,
        "token_ids": tuple(tokens),
        "sampling": changes.pop("sampling", None) or SamplingParams(temperature=0.0),
        "stop": changes.pop("stop", None) or StopRules(max_tokens=max_tokens),
        "timeout_s": 5.0,
    }
    return Prompt(**(values | changes))


async def collect(orchestrator, asked):
    """Return (tokens, finish, cached, logprobs) of one sample; errors are raised."""
    tokens, logprobs, finishes, cached = [], [], [], []
    async for delta in orchestrator.generate(asked):
        assert not finishes, "something came after the finish"
        tokens.extend(delta.token_ids)
        logprobs.extend(delta.logprobs)
        if delta.num_cached_tokens is not None:
            cached.append(delta.num_cached_tokens)
        if delta.finish is not None:
            finishes.append(delta.finish)
    assert len(finishes) == 1
    assert len(cached) <= 1
    return tokens, finishes[0], cached[0] if cached else None, logprobs
