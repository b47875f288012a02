"""The two actors of a cluster and the port to Ray: the only module that calls Ray's core, loaded by `factory` alone."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.experimental import internal_kv
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from core.clock import SystemClock
from core.errors import ConfigError, TandemError, WorkerLost
from deploy.local.control import Reply
from deploy.ray.api import End, Order, Supervisor, Told
from deploy.ray.controller import RayController
from deploy.ray.plan import DOMAIN_LABEL, GATEWAY, Needs, RayPlan, nodes_facts
from deploy.ray.supervisor import HostSupervisor

T = TypeVar("T")
# Ray has no public store that lives as long as its named actors do.
_kv_get, _kv_put, _kv_del = internal_kv._internal_kv_get, internal_kv._internal_kv_put, internal_kv._internal_kv_del  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
CONTROLLER = "pd-controller"
KV_SPACE = b"tandem"
FREE_POLL_S = 0.05
FREE_TIMEOUT_S = 30.0


def namespace_of(cluster: str) -> str:
    """Return the Ray namespace in which a cluster's actors have their names."""
    return f"tandem-{cluster}"


class SupervisorActor(HostSupervisor):
    """A supervisor on the host where Ray put it."""

    def __init__(self, cluster: str) -> None:
        context = ray.get_runtime_context()
        super().__init__(
            run_dir=Path.home() / ".tandem" / "ray" / cluster / context.get_node_id()[:12],
            host=ray.util.get_node_ip_address(),
            domain=str(context.get_node_labels().get(DOMAIN_LABEL, "")),
            clock=SystemClock(),
        )


class ControllerActor:
    """`pd-controller`: restarted by Ray for ever, it takes over the supervisors that live on."""

    async def __init__(self, plan: RayPlan) -> None:
        name = plan.spec.name
        run_dir = Path.home() / ".tandem" / "ray" / name / "controller"
        self._body = RayController(plan, RayClusterPort(name), run_dir)

    async def command(self, body: Reply) -> AsyncIterator[Reply]:
        """Carry out one command: any number of ``{"progress": line}``, then the answer or ``{"error": sentence}``."""
        lines: asyncio.Queue[Reply] = asyncio.Queue()

        async def run() -> None:
            last: Reply
            try:
                last = {"answer": await self._body.handle(body, lambda text: lines.put_nowait({"progress": text}))}
            except TandemError as error:
                last = {"error": error.message}
            lines.put_nowait(last)

        work = asyncio.create_task(run())
        while True:
            line = await lines.get()
            yield line
            if "progress" not in line:
                break
        await work


async def translated(call: Awaitable[T]) -> T:
    """Await a call of an actor; its death is WorkerLost, our own errors come as they were raised."""
    try:
        return await call
    except RayActorError as error:
        raise WorkerLost(f"the supervisor actor is gone: {str(error).strip().splitlines()[0]}") from error
    except RayTaskError as error:
        if isinstance(error.cause, TandemError):
            raise error.cause from error
        raise


class RemoteSupervisor:
    """`Supervisor` over an actor's handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def start(self, order: Order) -> Told:
        return await translated(self._handle.start.remote(order))

    async def told(self) -> Told:
        return await translated(self._handle.told.remote())

    async def ready(self) -> Mapping[str, object]:
        return await translated(self._handle.ready.remote())

    async def lifetime(self) -> End:
        return await translated(self._handle.lifetime.remote())

    async def signal(self, number: int) -> None:
        await translated(self._handle.signal.remote(number))


class RayClusterPort:
    """`RayPort` of one cluster. Ray's blocking calls run on threads."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._namespace = namespace_of(cluster)
        self._key = f"cluster/{cluster}".encode()
        self._gateway_node = ""

    async def create(self, name: str, role: str, needs: Needs, domain: str) -> Supervisor:
        options: dict[str, Any] = {"num_cpus": needs.cpus, "resources": {role: 1}}
        if role == GATEWAY:
            await self.gateway_host()
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(self._gateway_node, soft=False)
        if needs.gpus:
            options["num_gpus"] = needs.gpus
        if needs.memory_gib:
            options["memory"] = needs.memory_gib * 2**30
        if needs.nodes > 1:
            options = {
                "scheduling_strategy": await asyncio.to_thread(self._group, name, options, needs, domain),
                **options,
            }
        elif domain:
            options["label_selector"] = {DOMAIN_LABEL: domain}
        actor = ray.remote(SupervisorActor).options(
            name=name, namespace=self._namespace, lifetime="detached", max_restarts=0, **options
        )
        return RemoteSupervisor(await asyncio.to_thread(actor.remote, self._cluster))

    def _group(
        self, name: str, options: Mapping[str, Any], needs: Needs, domain: str
    ) -> PlacementGroupSchedulingStrategy:
        bundle: dict[str, float] = {"CPU": options["num_cpus"], **options["resources"]}
        bundle |= {"GPU": float(needs.gpus)} if needs.gpus else {}
        bundle |= {"memory": options["memory"]} if needs.memory_gib else {}
        group = placement_group(
            [dict(bundle) for _ in range(needs.nodes)],
            strategy="STRICT_SPREAD",
            # One that is not detached dies with its controller's process, and the worker in it.
            lifetime="detached",
            name=f"{self._namespace}/{name}",
            bundle_label_selector=[{DOMAIN_LABEL: domain} if domain else {}] * needs.nodes,
        )
        return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)

    async def find(self, name: str) -> Supervisor | None:
        handle = await asyncio.to_thread(self._handle, name)
        return None if handle is None else RemoteSupervisor(handle)

    def _handle(self, name: str) -> Any:
        try:
            return ray.get_actor(name, namespace=self._namespace)
        except ValueError:  # Ray's way to say that there is none
            return None

    async def names(self) -> Sequence[str]:
        found = cast("list[dict[str, str]]", await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True))
        return sorted(a["name"] for a in found if a["namespace"] == self._namespace and a["name"] != CONTROLLER)

    async def end(self, name: str) -> None:
        handle = await asyncio.to_thread(self._handle, name)
        if handle is not None:
            await asyncio.to_thread(ray.kill, handle, no_restart=True)
            async with asyncio.timeout(FREE_TIMEOUT_S):
                while await asyncio.to_thread(self._handle, name) is not None:
                    await asyncio.sleep(FREE_POLL_S)
        await asyncio.to_thread(self._remove_groups, lambda found: found == name)

    async def sweep(self, kept: Sequence[str]) -> Sequence[str]:
        return await asyncio.to_thread(self._remove_groups, lambda found: found not in kept)

    def _remove_groups(self, is_unwanted: Callable[[str], bool]) -> list[str]:
        removed: list[str] = []
        for key, group in cast("dict[str, dict[str, Any]]", placement_group_table()).items():
            prefix, _, name = str(group["name"]).partition("/")
            if prefix == self._namespace and group["state"] != "REMOVED" and is_unwanted(name):
                remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(key)))
                removed.append(str(group["name"]))
        return removed

    async def gateway_host(self) -> str:
        for node in cast("list[dict[str, Any]]", await asyncio.to_thread(ray.nodes)):
            if node["Alive"] and node["Resources"].get(GATEWAY, 0) > 0:
                self._gateway_node = str(node["NodeID"])
                return str(node["NodeManagerAddress"])
        raise ConfigError(
            "no node of the Ray cluster offers the resource 'gateway'; "
            "start one with: ray start --resources '{\"gateway\": 2}'"
        )

    async def domains(self) -> Sequence[str]:
        return nodes_facts(await asyncio.to_thread(ray.nodes))[1]

    async def load(self) -> bytes | None:
        return await asyncio.to_thread(_kv_get, self._key, namespace=KV_SPACE)

    async def save(self, data: bytes | None) -> None:
        if data is None:
            await asyncio.to_thread(_kv_del, self._key, namespace=KV_SPACE)
        else:
            await asyncio.to_thread(_kv_put, self._key, data, overwrite=True, namespace=KV_SPACE)
