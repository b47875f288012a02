"""A gateway and simulated workers as real processes on loopback, for tests that kill, stop and drain them."""

import asyncio
import json
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

from core.config import native_environment
from core.ids import fresh_incarnation
from core.rpc.admin import AdminClient
from core.rpc.proof import Proof
from gateway.text.tokenizer import load_tokenizer
from tests.fakes.cluster import MODEL
from tests.fakes.sim_decode import sim_answer
from tests.fakes.tokenizer import byte_level_definition, fixed_now, write_model_directory

ROOT = Path(__file__).parents[2]
START_S = 60.0


class Child:
    """One process with its ready file and its log."""

    def __init__(self, name, module, settings, directory: Path, run_dir: Path):
        self.name = name
        self.module = module
        self.settings = settings
        self.log_path = directory / f"{name}.log"
        self._ready = run_dir / f"{name}.json"
        self.process = None
        self.facts = {}

    async def start(self):
        sets = [word for key, value in self.settings.items() for word in ("--set", f"{key}={value}")]
        self._ready.unlink(missing_ok=True)
        environment = native_environment(threads=1)
        environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'proto'}"
        with self.log_path.open("ab") as sink:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", self.module, *sets, cwd=ROOT, env=environment, stdout=sink, stderr=sink
            )

    async def ready(self):
        async with asyncio.timeout(START_S):
            while True:
                if self._ready.exists():
                    self.facts = json.loads(self._ready.read_text())
                    if self.facts["pid"] == self.process.pid:
                        return self.facts
                assert self.process.returncode is None, self.log()
                await asyncio.sleep(0.02)

    def log(self):
        return self.log_path.read_text()[-4000:]

    async def kill(self, number=signal.SIGKILL):
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await self.process.wait()


class SimCluster:
    def __init__(self, directory: Path):
        self.directory = directory
        self.run_dir = directory / "run"
        self.run_dir.mkdir()
        self.secret = directory / "secret"
        self.secret.write_text("s" * 32)
        self.model = write_model_directory(directory / "model", byte_level_definition())
        self.tokenizer = load_tokenizer(self.model, fixed_now)
        self.children = {}
        self.admin = AdminClient(Proof(b"s" * 32, fresh_incarnation()))

    async def start_gateway(self, name="gateway-1", **settings):
        fixed = {
            "id": name,
            "run_dir": self.run_dir,
            "secret_file": self.secret,
            "model.path": self.model,
            "http.port": 0,
            "membership.port": 0,
        }
        child = Child(name, "gateway", fixed | _dotted(settings), self.directory, self.run_dir)
        self.children[name] = child
        await child.start()
        await child.ready()
        return child

    @property
    def gateway(self):
        return self.children["gateway-1"]

    @property
    def url(self):
        return f"http://{self.gateway.facts['http_address']}"

    async def start_worker(self, name, **settings):
        fixed = {
            "worker.id": name,
            "worker.run_dir": self.run_dir,
            "worker.secret_file": self.secret,
            "worker.gateways": json.dumps([self.gateway.facts["membership_address"]]),
            "role": "prefill" if name.startswith("p") else "decode",
        }
        child = Child(name, "tests.fakes.sim_worker", fixed | _dotted(settings), self.directory, self.run_dir)
        self.children[name] = child
        await child.start()
        return child

    async def start_workers(self, *names, **settings):
        await asyncio.gather(*(self.start_worker(name, **settings) for name in names))
        await asyncio.gather(*(self.children[name].ready() for name in names))
        await self.routable(*names)

    async def status(self, gateway="gateway-1"):
        address = self.children[gateway].facts["listener_address"]
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(b"GET /statusz HTTP/1.0\r\n\r\n")
        body = await reader.read()
        writer.close()
        return json.loads(body.partition(b"\r\n\r\n")[2])

    async def routable(self, *names, gateway="gateway-1"):
        """Wait until a gateway routes to these workers."""
        async with asyncio.timeout(START_S):
            while True:
                status = await self.status(gateway)
                if set(names) <= {worker["id"] for worker in status["workers"] if worker["routable"]}:
                    return
                await asyncio.sleep(0.05)

    async def statistics(self, name):
        child = self.children[name]
        address = child.facts["membership_address"] if name == "gateway-1" else child.facts["address"]
        return (await self.admin.statistics(address)).values

    async def settled(self, name, key, value):
        """Wait until a process's statistic has a value."""
        await self._until(name, key, lambda found: found == value)

    async def reached(self, name, key, least):
        """Wait until a process's statistic has at least a value."""
        await self._until(name, key, lambda found: found >= least)

    async def _until(self, name, key, satisfied):
        async with asyncio.timeout(START_S):
            while not satisfied((await self.statistics(name))[key]):  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.02)

    def text_of(self, prompt, num_tokens):
        """What a client must read, whatever happened on the way."""
        return self.tokenizer.decode(sim_answer(prompt, num_tokens))

    async def logged(self, name, sentence):
        """Wait until a process has logged a sentence."""
        async with asyncio.timeout(START_S):
            while True:
                if sentence in self.children[name].log():
                    return
                await asyncio.sleep(0.05)

    async def close(self):
        for child in self.children.values():
            if child.process is not None:
                await child.kill()


def _dotted(settings):
    return {key.replace("__", "."): value for key, value in settings.items()}


@asynccontextmanager
async def sim_cluster(directory: Path, *workers, gateway=None, **settings):
    cluster = SimCluster(directory)
    try:
        await cluster.start_gateway(**(gateway or {}))
        await cluster.start_workers(*workers, **settings)
        yield cluster
    finally:
        await cluster.close()


def body(prompt=(11, 12, 13), **changes):
    return {
        "model": MODEL,
        "prompt": list(prompt),
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
        "stream": True,
    } | changes


async def stream(client, url, request):
    """Yield the JSON events of a completion; the end is a string: ``[DONE]`` or ``closed``."""
    async with client.stream("POST", f"{url}/v1/completions", json=request) as response:
        if response.status_code != 200:
            yield {
                "status": response.status_code,
                "headers": dict(response.headers),
                **json.loads(await response.aread()),
            }
            return
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                yield "[DONE]"
                return
            if line.startswith("data: "):
                yield json.loads(line[6:])
    yield "closed"


async def complete(client, url, request):
    """Return (text, finish reason, usage, last event) of a streamed completion."""
    text, finish, usage, last = "", None, None, None
    async for event in stream(client, url, request):
        last = event
        if isinstance(event, str):
            break
        if "error" in event:
            break
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            text += choice["text"]
            finish = choice["finish_reason"] or finish
    return text, finish, usage, last
