"""Ray as the controller sees it, without Ray: supervisors in memory, hosts that fall silent, a value that is kept."""

import asyncio
import contextlib
import http.server
import tempfile
import threading
from pathlib import Path

from core.errors import WorkerLost
from deploy.actuators.ray import RayActuator
from deploy.local.spec import ClusterSpec
from deploy.ray.api import End, Told
from deploy.ray.controller import RayController
from deploy.ray.plan import RayPlan


class FakeSupervisor:
    """Runs no process: `ready` at once, ends when it is signalled or told to by the test."""

    def __init__(self, ray, name, role, domain):
        self.ray, self.name, self.role, self.domain = ray, name, role, domain
        self.order = None
        self.asked = False
        self.is_silent = False
        self.fails = None
        self._ended = asyncio.get_running_loop().create_future()

    async def _awake(self):
        while self.is_silent:  # noqa: ASYNC110 - a host that is away tells nobody
            await asyncio.sleep(0.01)

    async def start(self, order):
        await self._awake()
        if self.ray.is_full:
            await asyncio.Event().wait()
        if self.ray.refuses is not None:
            raise self.ray.refuses
        self.order = order
        return await self.told()

    async def told(self):
        await self._awake()
        if self._ended.done() and isinstance(self._ended.exception(), WorkerLost):
            raise self._ended.exception()
        return Told(order=self.order, pid=100 + len(self.ray.created), host="h", log="l", is_asked=self.asked)

    async def ready(self):
        await self._awake()
        at = self.ray.health
        return {"http_address": at, "listener_address": at, "address": "h:1", "fingerprint": "f", "domain": self.domain}

    async def lifetime(self):
        await self._awake()
        end = await asyncio.shield(self._ended)
        await self._awake()
        return end

    async def signal(self, number):
        await self._awake()
        self.asked = True
        self.exits(0)

    def exits(self, code):
        if not self._ended.done():
            self._ended.set_result(End(code=code, log_tail="its last line"))

    def dies(self):
        if not self._ended.done():
            self._ended.set_exception(WorkerLost("the actor is gone"))
            self._ended.exception()
            self.ray.supervisors.pop(self.name, None)


class FakeRay:
    """`RayPort`. `supervisors` are alive by name; `created` and `ended` are names in order."""

    def __init__(self, health):
        self.health = health
        self.supervisors = {}
        self.created, self.ended = [], []
        self.groups = set()
        self.saved = None
        self.nodes = ["a", "b"]
        self.refuses = None
        self.is_full = False

    async def create(self, name, role, needs, domain):
        assert name not in self.supervisors, f"Ray refuses a second {name}"
        self.created.append(name)
        if needs.nodes > 1:
            self.groups.add(name)
        self.supervisors[name] = FakeSupervisor(self, name, role, domain)
        return self.supervisors[name]

    async def find(self, name):
        return self.supervisors.get(name)

    async def names(self):
        return sorted(self.supervisors)

    async def end(self, name):
        self.groups.discard(name)
        if self.supervisors.pop(name, None) is not None:
            self.ended.append(name)

    async def sweep(self, kept):
        gone = sorted(self.groups - set(kept))
        self.groups -= set(gone)
        return gone

    async def gateway_host(self):
        return "127.0.0.1"

    async def domains(self):
        return self.nodes

    async def load(self):
        return self.saved

    async def save(self, data):
        self.saved = data


class Healthy:
    """A listener that answers every probe with 200, as every process of a fake cluster would."""

    def __enter__(self):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        return f"127.0.0.1:{self._server.server_port}"

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.asynccontextmanager
async def on_fake_ray():
    """An actuator whose cluster runs, one worker a pool, on a fake Ray."""
    plan = RayPlan(spec=ClusterSpec(name="t", model="scripted", drain_s=1.0), needs={})
    with Healthy() as address, tempfile.TemporaryDirectory() as folder:
        body = RayController(plan, FakeRay(address), Path(folder))
        await body.handle({"command": "wait"}, lambda _: None)
        yield RayActuator(lambda command: body.handle(command, lambda _: None), "t")
        await body.handle({"command": "down", "budget_s": 1.0}, lambda _: None)
