"""`python -m tests.fakes.sim_worker --set worker.id=d1 --set role=decode ...`: a simulated worker as a real process.

Real gRPC server, membership, admin, health listener, ready file and exit codes (`core.worker_shell`); tokens come
from `tests.fakes.sim_decode`. No torch, no KV, no model. A prefill worker only registers: simulated decode workers
need nothing of it. For tests of routing and resilience, and for benchmarks of the gateway.
"""

import asyncio
import os
import signal
import sys
from collections import deque
from contextlib import AsyncExitStack

import msgspec

from core import log
from core.clock import SystemClock
from core.config import read_secret
from core.exported import ExportedStatistics
from core.hashing import event_hash
from core.ids import WorkerId, fresh_incarnation
from core.lifecycle import State
from core.metrics import Metrics
from core.process import Departure, run_process
from core.rpc.admin import Statistics
from core.rpc.generate import add_generate
from core.rpc.proof import Proof
from core.rpc.server import RpcServer
from core.tls import check_tls
from core.worker import KvEvent, KvEventBatch, KvSnapshot, Load, Role
from core.worker_config import DrainSection, WorkerSection
from core.worker_shell import WorkerShell
from tests.fakes.cluster import MODEL, PAGE_TOKENS, registration
from tests.fakes.sim_decode import EOS, VOCAB, SimDecode


class SimConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sections as in real workers, and the behaviour."""

    worker: WorkerSection
    role: str = "decode"
    model: str = MODEL
    revision: str = "r1"
    prefill_mode: str = "remote"
    num_rows: int = 256
    num_pages: int = 4096
    max_tokens_total: int = 4096
    vocab_size: int = VOCAB
    step_s: float = 0.01
    tokens_per_step: int = 1
    plan: str = ""
    """Actions of `tests.fakes.sim_decode`, e.g. ``tokens:3 die``."""
    plan_requests: int = 1
    """How many requests get the plan; later ones run plainly."""
    drain: DrainSection = DrainSection(budget_s=30.0)


def parse_plan(text):
    actions = []
    for word in text.split():
        kind, _, value = word.partition(":")
        actions.append((kind,) if not value else (kind, int(value) if value.isdigit() else value))
    return actions


class SimBody:
    """Implements `core.worker_shell.WorkerBody`."""

    def __init__(self, config, decode, push):
        self._config = config
        self._decode = decode
        self._push = push
        self._pages = {}
        self._sequence = 0

    async def load(self):
        running = self._decode.running
        return Load(
            state=State.READY,
            pages_total=self._config.num_pages,
            pages_free=self._config.num_pages,
            pages_evictable=0,
            rows_total=self._config.num_rows,
            rows_used=min(running, self._config.num_rows),
            waiting_requests=0,
            waiting_tokens=0,
            running_requests=running,
            step_ms=self._config.step_s * 1000,
            prefill_tokens_per_s=10_000.0,
        )

    async def statistics(self, audit):
        return Statistics(values={"running": float(self._decode.running)} | self._decode.counts)

    async def snapshot(self):
        return KvSnapshot(incarnation=self._decode.incarnation, sequence=self._sequence, hashes=tuple(self._pages))

    def heartbeat_age_s(self):
        return 0.0

    def begin_drain(self):
        self._decode.draining = True

    async def finished(self):
        while True:
            if not self._decode.running:
                return
            await asyncio.sleep(0.01)

    async def hand_back(self):
        self._decode.kill()

    def remember(self, request):
        """Tell the gateways of the prompt's pages, as a prefix tree would."""
        events = [event_hash(page) for page in request.page_hashes]
        new = tuple(page for page in events if page not in self._pages)
        if new and len(self._pages) + len(new) <= self._config.num_pages:
            parents = dict(zip(events[1:], events, strict=False))
            self._pages.update(dict.fromkeys(new))
            self._sequence += 1
            event = KvEvent(kind="stored", hashes=new, parent=parents.get(new[0], 0))
            self._push(KvEventBatch(sequence=self._sequence, events=(event,)))


async def serve(config, departure: Departure):
    secret = read_secret(config.worker.secret_file) if config.worker.secret_file else b""
    proof = Proof(secret, fresh_incarnation(), check_tls(config.worker.tls))
    left = deque([parse_plan(config.plan)] * config.plan_requests if config.plan else [])
    decode = SimDecode(
        proof.incarnation,
        plan=lambda _submit: left.popleft() if left else (),
        step_s=config.step_s,
        tokens_per_step=config.tokens_per_step,
        die=lambda: os.kill(os.getpid(), signal.SIGKILL),
    )
    async with AsyncExitStack() as stack:
        metrics = Metrics()
        shell = WorkerShell(
            section=config.worker,
            kind=config.role,
            proof=proof,
            metrics=metrics,
            departure=departure,
            clock=SystemClock(),
        )
        shell.open_listener(stack)
        server = RpcServer(proof)
        add_generate(server, decode)
        body = SimBody(config, decode, shell.push_events)
        decode.on_prompt = body.remember
        steps = asyncio.create_task(decode.run())
        stack.callback(steps.cancel)
        await shell.serve(
            stack,
            server,
            body,
            register=lambda address, http_address: registration(
                WorkerId(config.worker.id),
                Role(config.role),
                incarnation=proof.incarnation,
                model=config.model,
                revision=config.revision,
                address=address,
                http_address=http_address,
                secret_check=proof.check_value(),
                page_tokens=PAGE_TOKENS,
                num_pages=config.num_pages,
                num_rows=config.num_rows,
                max_tokens_total=config.max_tokens_total,
                vocab_size=config.vocab_size,
                eos_token_ids=(EOS,),
                prefill_mode=config.prefill_mode,
            ),
            exported=ExportedStatistics(metrics, ()),
        )


def run():
    return run_process(
        SimConfig,
        sys.argv[1:],
        prog="sim_worker",
        configure=lambda config: log.configure(config.worker.id, config.worker.log_level),
        budget_s=lambda config: config.drain.budget_s,
        serve=serve,
    )


if __name__ == "__main__":
    sys.exit(run())
