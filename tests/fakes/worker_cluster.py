"""Real workers, in this process or as processes of their own, and a small gateway that drives them over gRPC."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from core.clock import SystemClock
from core.config import load
from core.ids import Incarnation, WorkerId
from core.process import Departure
from core.request import GenerateRequest, SamplingParams, StopRules
from core.rpc.admin import AdminClient
from core.rpc.generate import GenerateClient
from core.rpc.kv_index import KvIndexClient
from core.rpc.membership import add_membership
from core.rpc.proof import Proof
from core.rpc.server import RpcServer
from core.stream import PrefillTarget, StreamHello
from tests.fakes.decode import InProcessGateway
from tests.fakes.rpc import RecordingMembership

ROOT = Path(__file__).resolve().parents[2]
SECRET = b"a secret for tests only"
SHARED_MEMORY = Path("/dev/shm")
MODULES = {"prefill": "prefill_worker", "decode": "decode_worker"}


def ask(token_ids, max_tokens=24, *, request_id="req-1", **changes) -> GenerateRequest:
    """A greedy request for the model `m`."""
    fields = {
        "request_id": request_id,
        "model": "m",
        "token_ids": tuple(token_ids),
        "num_prompt_tokens": len(token_ids),
        "sampling": SamplingParams(temperature=0.0),
        "stop": StopRules(max_tokens=max_tokens),
        "timeout_s": 60.0,
    } | changes
    return GenerateRequest(**fields)


class Worker:
    """One running worker, as its ready file describes it."""

    def __init__(self, kind, facts) -> None:
        self.kind = kind
        self.facts = facts
        self.id = facts["id"]
        self.address = facts["address"]
        self.incarnation = Incarnation(facts["incarnation"])

    @property
    def target(self) -> PrefillTarget:
        return PrefillTarget(worker_id=WorkerId(self.id), address=self.address, incarnation=self.incarnation)


class ProcessWorker(Worker):
    """A worker in a process that this test started."""

    def __init__(self, kind, facts, process, log) -> None:
        super().__init__(kind, facts)
        self.process = process
        self.log = log

    def signal(self, number) -> None:
        self.process.send_signal(number)

    async def exit_code(self, timeout_s=60) -> int:
        async with asyncio.timeout(timeout_s):
            return await self.process.wait()


class InProcessWorker(Worker):
    """A worker on the test's own event loop."""

    def __init__(self, kind, facts, departure, task) -> None:
        super().__init__(kind, facts)
        self.departure = departure
        self.task = task

    async def leave(self, budget_s=0.0) -> None:
        self.departure.begin(budget_s)
        await self.task


class WorkerCluster:
    """Starts workers against one recording membership; ends everything that it started."""

    def __init__(self, directory: Path, model_dir: Path, serve=None) -> None:
        self.directory = directory
        self.model_dir = model_dir
        self.serve = serve or {}
        """Kind -> (config type, serve function) for workers in this process."""
        self.proof = Proof(SECRET, Incarnation("c" * 32))
        self.membership = RecordingMembership()
        self.workers: list[Worker] = []
        self.gateways: list[RpcGateway] = []
        self.admin = AdminClient(self.proof)
        self.index = KvIndexClient(self.proof)
        self.segments = Path(tempfile.mkdtemp(prefix="tandem-test-", dir=SHARED_MEMORY))
        """Where the workers of this cluster keep shared KV segments, and nobody else."""
        self._server: RpcServer | None = None
        self._address = ""
        self._numbers = {"prefill": 0, "decode": 0}

    async def __aenter__(self):
        (self.directory / "secret").write_bytes(SECRET)
        self._server = RpcServer(self.proof)
        add_membership(self._server, self.membership)
        self._address = f"127.0.0.1:{await self._server.start('127.0.0.1', 0)}"
        return self

    async def __aexit__(self, *_):
        for gateway in self.gateways:
            await gateway.cut()
        for worker in self.workers:
            if isinstance(worker, InProcessWorker):
                with contextlib.suppress(Exception):
                    await worker.leave()
            elif worker.process.returncode is None:
                worker.signal(signal.SIGCONT)
                worker.signal(signal.SIGTERM)
                try:
                    await worker.exit_code(30)
                except TimeoutError:
                    worker.signal(signal.SIGKILL)
                    await worker.exit_code()
        await self._server.stop(0)
        left = sorted(path.name for path in self.segments.iterdir())
        shutil.rmtree(self.segments)
        assert left == [], "shared segments were left behind"

    def config(self, kind, sets=()) -> tuple[str, Path, list[str]]:
        self._numbers[kind] += 1
        worker_id = f"{kind}-{self._numbers[kind]}"
        path = self.directory / f"{worker_id}.toml"
        path.write_text(
            f"""
[worker]
id = "{worker_id}"
gateways = ["{self._address}"]
secret_file = "{self.directory / "secret"}"
run_dir = "{self.directory}"
[model]
path = "{self.model_dir}"
name = "m"
[engine]
page_tokens = 8
num_pages = 256
num_rows = 32
chunk_tokens = 32
[transfer]
segment_directory = "{self.segments}"
[drain]
budget_s = 20
"""
        )
        return worker_id, path, list(sets)

    def arguments(self, kind, sets=()) -> list[str]:
        _, path, sets = self.config(kind, sets)
        return ["-m", MODULES[kind], "--config", str(path), *(part for s in sets for part in ("--set", s))]

    async def spawn(self, *kinds, sets=()) -> list[ProcessWorker]:
        """Start processes side by side and wait until all are ready."""
        return list(await asyncio.gather(*(self._spawn(kind, sets) for kind in kinds)))

    async def _spawn(self, kind, sets) -> ProcessWorker:
        worker_id, path, sets = self.config(kind, sets)
        log = self.directory / f"{worker_id}.log"
        arguments = [part for s in sets for part in ("--set", s)]
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                MODULES[kind],
                "--config",
                str(path),
                *arguments,
                stdout=output,
                stderr=output,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        facts = await self._facts(worker_id, lambda: process.returncode is not None, log.read_text)
        worker = ProcessWorker(kind, facts, process, log)
        self.workers.append(worker)
        return worker

    async def run(self, kind, sets=()) -> InProcessWorker:
        """Start a worker on this event loop."""
        worker_id, path, sets = self.config(kind, sets)
        config_type, serve = self.serve[kind]
        config = load(config_type, path, sets)
        departure = Departure(SystemClock(), config.drain.budget_s)
        task = asyncio.create_task(serve(config, departure))
        facts = await self._facts(worker_id, task.done, lambda: repr(task.exception()))
        worker = InProcessWorker(kind, facts, departure, task)
        self.workers.append(worker)
        return worker

    async def _facts(self, worker_id, has_ended, why):
        path = self.directory / f"{worker_id}.json"
        async with asyncio.timeout(60):
            while not path.exists():
                assert not has_ended(), f"{worker_id} ended before it was ready: {why()}"
                await asyncio.sleep(0.02)
        return msgspec.json.decode(path.read_bytes())

    async def gateway(self, worker, name="a" * 32, **options) -> "RpcGateway":
        """Open a stream to a decode worker."""
        gateway = RpcGateway(worker, self.proof, name, **options)
        await gateway.open()
        self.gateways.append(gateway)
        return gateway

    async def settled(self, worker, *, timeout_s=60, allow=()) -> dict[str, float]:
        """Wait until a worker holds nothing but free and cached pages; return its statistics. Fails with its findings."""
        until = time.monotonic() + timeout_s
        while True:
            found = await self.admin.statistics(worker.address, audit=True)
            left = {name: found.values.get(name) for name in LEFT_OVERS if found.values.get(name) and name not in allow}
            if not found.audit_findings and not left:
                return dict(found.values)
            assert time.monotonic() < until, f"{worker.id} does not settle: {found.audit_findings} {left}"
            await asyncio.sleep(0.05)

    async def busy(self, worker, statistic, *, timeout_s=60) -> None:
        """Wait until a statistic of a worker is not 0."""
        until = time.monotonic() + timeout_s
        while True:
            if (await self.admin.statistics(worker.address)).values.get(statistic):
                return
            assert time.monotonic() < until, f"{statistic} of {worker.id} stays 0"
            await asyncio.sleep(0.005)


LEFT_OVERS = (
    "engine_pages_private",
    "engine_pages_landing",
    "engine_pages_unproven",
    "engine_pages_fenced",
    "engine_pages_loading",
    "engine_rows_used",
    "transfer_leases",
    "transfer_open_ops",
    "worker_requests_live",
)
"""Statistics that are 0 in a worker at rest."""


class RpcGateway(InProcessGateway):
    """A gateway's end of one stream over real gRPC."""

    def __init__(self, worker, proof, name, **options) -> None:
        super().__init__(None, Incarnation(name), **options)
        self.worker = worker
        self.client = GenerateClient(proof)
        self.stream = None

    async def open(self, resume_after=-1) -> None:
        hello = StreamHello(gateway=self.gateway, worker=self.worker.incarnation, resume_after=resume_after)
        self.stream = await self.client.open(self.worker.address, hello)
        self.connection = asyncio.create_task(self._pump())

    async def _pump(self) -> None:
        async for frame in self.stream.frames():
            await self._take(frame)

    def send(self, frame) -> None:
        self.stream.post(frame)

    async def cut(self) -> None:
        if self.connection is None:
            return
        self.connection.cancel()
        await asyncio.gather(self.connection, return_exceptions=True)
        await self.stream.close()
        self.connection = None

    async def answer(self, handle, request, prefill=None, timeout_s=60):
        """Submit and wait for the terminal record; returns (tokens, record)."""
        self.submit(handle, request, prefill)
        record = await self.ended(handle, timeout_s)
        return self.tokens.get(handle, []), record
