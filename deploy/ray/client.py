"""Talks to a cluster on Ray from outside: connects, starts its controller actor, sends it commands.

Loaded by `factory` alone. One connection a process: Ray allows no second.
"""

import contextlib
import logging
from collections.abc import Generator, Iterator
from typing import Any, cast

import ray
from ray.exceptions import RayActorError

from core.errors import ConfigError
from deploy.local.control import Progress, Reply
from deploy.ray.actors import CONTROLLER, ControllerActor, namespace_of
from deploy.ray.plan import RayPlan, missing_resources, nodes_facts

CONTROLLER_CPUS = 0
"""It waits most of the time; a fixed share would keep a worker out."""


@contextlib.contextmanager
def connected(address: str) -> Generator[None]:
    """Be a driver of the Ray cluster at `address` (host:port, or auto: the one of this host); raises ConfigError."""
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"cannot reach a Ray cluster at {address!r}: {reason}; start one with: ray start --head"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def start(plan: RayPlan, on_progress: Progress) -> Reply:
    """Start a cluster and wait until it serves; on failure nothing of it stays. Raises ConfigError with the reason."""
    if _controller(plan.spec.name) is not None:
        raise ConfigError(
            f"a cluster {plan.spec.name!r} already runs there; choose another --name, or: tandem down --on ray"
        )
    if complaint := missing_resources(plan, nodes_facts(ray.nodes())[0]):
        raise ConfigError(complaint)
    ray.remote(ControllerActor).options(
        name=CONTROLLER,
        namespace=namespace_of(plan.spec.name),
        lifetime="detached",
        max_restarts=-1,
        num_cpus=CONTROLLER_CPUS,
    ).remote(plan)
    try:
        return ask(plan.spec.name, {"command": "wait"}, on_progress)
    except (ConfigError, KeyboardInterrupt):
        end(plan.spec.name, 0.0, on_progress)
        raise


def end(cluster: str, budget_s: float | None, on_progress: Progress) -> None:
    """Drain and end everything of a cluster, its controller last."""
    ask(cluster, {"command": "down", "budget_s": budget_s}, on_progress)
    ray.kill(_controller(cluster), no_restart=True)


def ask(cluster: str, body: Reply, on_progress: Progress) -> Reply:
    """Send one command to the controller, pass progress on, return the answer; raises ConfigError with its sentence."""
    controller = _controller(cluster)
    if controller is None:
        raise ConfigError(f"no cluster {cluster!r} runs on this Ray cluster; start one with: tandem up --on ray")
    for line in _lines(controller, body):
        if "progress" in line:
            on_progress(str(line["progress"]))
        elif "answer" in line:
            return cast("Reply", line["answer"])
        else:
            raise ConfigError(str(line["error"]))
    raise ConfigError("the controller ended in the middle of the command; Ray starts it again: look with tandem status")


def _lines(controller: Any, body: Reply) -> Iterator[Reply]:
    try:
        for line in controller.command.options(num_returns="streaming").remote(body):
            yield cast("Reply", ray.get(line))
    except RayActorError:
        return


def _controller(cluster: str) -> Any:
    try:
        return ray.get_actor(CONTROLLER, namespace=namespace_of(cluster))
    except ValueError:  # Ray's way to say that there is none
        return None
