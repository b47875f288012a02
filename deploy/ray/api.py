"""What the controller needs of Ray, so that its tests need no Ray: supervisors by name, and one value that is kept."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from deploy.local.spec import Revision
from deploy.ray.plan import Needs


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What a supervisor starts. `config_toml` is completed by what only its host knows."""

    slot_id: str
    role: str
    revision: Revision
    config_toml: str
    sets: tuple[str, ...]
    threads: int
    domain: str
    """Of the hosts it was ordered for; empty: any."""
    secret: str


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """A supervisor about its process."""

    order: Order | None
    pid: int = 0
    host: str = ""
    log: str = ""
    is_asked: bool = False
    """The process was told to leave."""


class End(msgspec.Struct, frozen=True, kw_only=True):
    """How a process ended."""

    code: int
    log_tail: str = ""


class Supervisor(Protocol):
    """One supervisor actor as the controller sees it. Every call raises WorkerLost once the actor is dead."""

    async def start(self, order: Order) -> Told:
        """Start the process; raises ConfigError if this host cannot."""
        ...

    async def told(self) -> Told:
        """Return what it supervises; also the sign of life."""
        ...

    async def ready(self) -> Mapping[str, object]:
        """Wait until the process has written its ready file and return the facts in it; empty if it ended before."""
        ...

    async def lifetime(self) -> End:
        """Wait for the end of the process: the death notice."""
        ...

    async def signal(self, number: int) -> None:
        """Signal the process."""
        ...


class RayPort(Protocol):
    """Ray itself."""

    async def create(self, name: str, role: str, needs: Needs, domain: str) -> Supervisor:
        """Order a supervisor; returns before Ray has found room for it."""
        ...

    async def find(self, name: str) -> Supervisor | None:
        """Return the supervisor of that name, None if there is none (any more)."""
        ...

    async def names(self) -> Sequence[str]:
        """Return the names of all supervisors of this cluster, sorted."""
        ...

    async def end(self, name: str) -> None:
        """End a supervisor and free its name and its placement group; no error if it is gone."""
        ...

    async def sweep(self, kept: Sequence[str]) -> Sequence[str]:
        """Remove this cluster's placement groups whose supervisor is not in `kept`; return their names."""
        ...

    async def gateway_host(self) -> str:
        """Return the address of the host that offers the resource `gateway`, and keep gateways there."""
        ...

    async def domains(self) -> Sequence[str]:
        """Return the network domains that live nodes name."""
        ...

    async def load(self) -> bytes | None:
        """Return what was saved."""
        ...

    async def save(self, data: bytes | None) -> None:
        """Keep `data` as long as the Ray cluster lives; None: forget it."""
        ...
