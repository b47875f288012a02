"""`tandem up|status|scale|rollout|drain|down --on ray`: what the command line does on a Ray cluster."""

import contextlib
from collections.abc import Generator
from types import ModuleType

from deploy.local.commands import model_name
from deploy.local.control import Progress, Reply
from deploy.local.session import curl_line
from deploy.ray.factory import ray_client
from deploy.ray.plan import RayPlan


@contextlib.contextmanager
def _at(address: str) -> Generator[ModuleType]:
    client = ray_client()
    with client.connected(address):
        yield client


def ray_up(address: str, plan: RayPlan, report: Progress) -> int:
    """Start the cluster and return once it serves: it lives on without this process."""
    with _at(address) as client:
        status = client.start(plan, report)
    name = model_name(plan.spec)
    report(f"serving {name} at http://{status['http_address']}")
    report(curl_line(str(status["http_address"]), name))
    return 0


def ray_ask(address: str, cluster: str, body: Reply, report: Progress) -> Reply:
    """Send one command to a running cluster."""
    with _at(address) as client:
        return client.ask(cluster, body, report)


def ray_down(address: str, cluster: str, budget_s: float | None, report: Progress) -> int:
    """End the cluster."""
    with _at(address) as client:
        client.end(cluster, budget_s, report)
    report("the cluster is gone")
    return 0
