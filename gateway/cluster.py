"""What every sample of one gateway process shares. Values only; wired by the composition root."""

from dataclasses import dataclass

from core.clock import Clock
from gateway.attempt import RetryBudget, RetryRules
from gateway.directory import Directory
from gateway.leases import Leases
from gateway.links import Links
from gateway.metrics import GatewayMetrics
from gateway.router import Router
from gateway.routing.job import RoutingRules
from gateway.trace_recorder import TraceRecorder


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Collaborators and rules of samples."""

    directory: Directory
    router: Router
    links: Links
    clock: Clock
    retries: RetryRules
    routing: RoutingRules
    budget: RetryBudget
    metrics: GatewayMetrics
    leases: Leases
    recorder: TraceRecorder | None = None
