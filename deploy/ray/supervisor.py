"""What a supervisor actor does on its host: one process, its configuration, its end. Knows no Ray.

Data never passes through here: the process serves on ports of its own.
"""

import asyncio
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path

from core.clock import Clock
from core.errors import ConfigError
from deploy.local.launcher import GATEWAY_IDS
from deploy.local.models import cache_directory, model_directory
from deploy.local.slot import Slot
from deploy.ray.api import End, Order, Told
from deploy.ray.shared_listener import SharedListener, take_listener
from deploy.sweep import SHARED_MEMORY
from kv_transfer.memory import sweep_stale_segments

POLL_S = 0.1


class HostSupervisor:
    """Starts one process below `run_dir` that listens on `host` (the address other hosts know) and belongs to `domain`."""

    def __init__(self, *, run_dir: Path, host: str, domain: str, clock: Clock) -> None:
        self._run_dir = run_dir
        self._host = host
        self._domain = domain
        self._clock = clock
        self._order: Order | None = None
        self._slot: Slot | None = None
        self._started = asyncio.Event()
        self._listener: SharedListener | None = None

    async def start(self, order: Order) -> Told:
        if self._order is not None:
            raise ConfigError(f"{order.slot_id} was started already")
        self._order = order
        model = await asyncio.to_thread(
            model_directory, str(order.revision.model_dir), cache_directory(), lambda _: None
        )
        self._run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        secret = self._run_dir / f"{order.slot_id}.secret"
        secret.touch(mode=0o600)
        secret.write_text(order.secret)
        slot = Slot(
            slot_id=order.slot_id, role=order.role, revision=order.revision, run_dir=self._run_dir, clock=self._clock
        )
        sets = [
            *self._listen(slot),
            *host_sets(
                order.role, host=self._host, domain=self._domain, run_dir=self._run_dir, secret=secret, model=model
            ),
            *order.sets,
        ]
        await slot.start(order.config_toml, sets, order.threads)
        self._slot = slot
        self._started.set()
        return await self.told()

    def _listen(self, slot: Slot) -> list[str]:
        """Give a gateway the socket of the one before it; return the settings that say so."""
        if slot.role != "gateway":
            return []
        assert self._order is not None, "it is being started"
        port = int(tomllib.loads(self._order.config_toml)["http"]["port"])
        others = [name for name in GATEWAY_IDS if name != slot.id]
        self._listener = take_listener(str(self._run_dir), slot.id, others, self._host, port)
        slot.inherits = (self._listener.fileno(),)
        return [f"http.listener_fd={self._listener.fileno()}", "http.reuse_port=false"]

    async def told(self) -> Told:
        slot = self._slot
        if slot is None:
            return Told(order=self._order, host=self._host)
        return Told(
            order=self._order,
            pid=slot.pid or 0,
            host=self._host,
            log=str(slot.log_path),
            is_asked=slot.asked,
        )

    async def ready(self) -> Mapping[str, object]:
        slot = await self._running()
        while not slot.poll_ready():
            if slot.pid is None or slot.asked:
                return {}
            await asyncio.sleep(POLL_S)
        return slot.facts

    async def lifetime(self) -> End:
        slot = await self._running()
        assert slot.process is not None, "a slot that was started has a process"
        code = await slot.process.wait()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if code != 0:
            sweep_stale_segments(str(SHARED_MEMORY))
        tail = slot.log_tail()
        slot.forget()
        (self._run_dir / f"{slot.id}.secret").unlink(missing_ok=True)
        return End(code=code, log_tail=tail)

    async def signal(self, number: int) -> None:
        slot = await self._running()
        slot.asked = True
        if slot.pid is not None and slot.process is not None:
            slot.process.send_signal(number)

    async def _running(self) -> Slot:
        await self._started.wait()
        assert self._slot is not None, "set before the event"
        return self._slot


def host_sets(role: str, *, host: str, domain: str, run_dir: Path, secret: Path, model: Path) -> list[str]:
    """Return the `--set` values of a process that only its host knows."""
    listens = ("http", "membership", "listener") if role == "gateway" else ("worker", "transfer")
    prefix = "" if role == "gateway" else "worker."
    values = [f"{section}.host={json.dumps(host)}" for section in listens]
    values += [f"{prefix}run_dir={json.dumps(str(run_dir))}", f"{prefix}secret_file={json.dumps(str(secret))}"]
    values += [f"model.path={json.dumps(str(model))}"]
    if domain and role != "gateway":
        values.append(f"worker.domain={json.dumps(domain)}")
    return values
