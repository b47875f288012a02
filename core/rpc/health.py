"""The standard health service (grpc.health.v1), saying what /readyz says. Needs no secret: orchestrators have none."""

from typing import Any, cast

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc


class Health:
    """Answers Check and Watch for the whole process (service name "")."""

    def __init__(self, server: aio.Server) -> None:
        self._servicer: Any = cast("Any", health).aio.HealthServicer()
        self._is_ready: bool | None = None
        cast("Any", health_pb2_grpc).add_HealthServicer_to_server(self._servicer, server)

    async def show(self, is_ready: bool) -> None:
        """Tell whoever asks and watches from now on."""
        if is_ready != self._is_ready:
            self._is_ready = is_ready
            status = health_pb2.HealthCheckResponse
            await self._servicer.set("", status.SERVING if is_ready else status.NOT_SERVING)
