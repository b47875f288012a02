"""One controller per cluster on Kubernetes: a Lease object, whose count of transitions is the fence of orders.

A holder renews it; whoever saw it unchanged for its whole duration may take it. Clocks of hosts are never compared.
"""

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime

from core.clock import Clock
from core.errors import ConfigError
from deploy.actuators.api import StaleFence
from deploy.actuators.kubernetes import LEASE
from deploy.actuators.kubernetes_api import Body, Conflict, KubernetesApi

_LOG = logging.getLogger(__name__)
DURATION_S = 15
RENEW_S = 5.0


class LeaseLock:
    """Held from `acquire` until `renew` raises or `release`. Asyncio."""

    def __init__(
        self, api: KubernetesApi, clock: Clock, holder: str, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        """`holder` is unique for this process; `now` is only written down for people."""
        self._api = api
        self._clock = clock
        self._holder = holder
        self._now = now
        self.fence = 0

    async def acquire(self, poll_s: float = RENEW_S) -> int:
        """Wait until nobody holds the lease, take it, and return a fence larger than any before."""
        seen, since = "", self._clock.now()
        while True:
            lease = await self._read()
            spec = lease.setdefault("spec", {})
            mark = f"{spec.get('holderIdentity')} {spec.get('renewTime')}"
            if mark != seen:
                seen, since = mark, self._clock.now()
            is_over = self._clock.now() - since >= float(spec.get("leaseDurationSeconds") or DURATION_S)
            if (not spec.get("holderIdentity") or is_over) and await self._take(lease):
                _LOG.info("this controller leads, fence %d", self.fence)
                return self.fence
            await asyncio.sleep(poll_s)

    async def seize(self) -> int:
        """Take the lease from whoever holds it, for a person: the holder notices at its next order or renewal."""
        while True:
            lease = await self._read()
            lease.setdefault("spec", {})
            if await self._take(lease):
                return self.fence

    async def renew(self, period_s: float = RENEW_S) -> None:
        """Keep the lease until cancelled; raises StaleFence once another holds it, or it could have been taken."""
        renewed = self._clock.now()
        while True:
            await asyncio.sleep(period_s)
            try:
                lease = await self._read()
                is_ours = lease.get("spec", {}).get("holderIdentity") == self._holder
                if is_ours and await self._write(lease, self._holder):
                    renewed = self._clock.now()
            except ConfigError as error:
                _LOG.warning("the lease was not renewed: %s", error.message)
                is_ours = True  # as far as we know
            if not is_ours:
                raise StaleFence(f"controller {self.fence} lost its lease to another; this one must stop")
            if self._clock.now() - renewed >= DURATION_S:
                raise StaleFence(f"controller {self.fence} could not renew its lease for {DURATION_S} s; it must stop")

    async def release(self) -> None:
        """Let another take over at once."""
        lease = await self._read()
        if lease.get("spec", {}).get("holderIdentity") == self._holder:
            await self._write(lease, "")

    async def _take(self, lease: Body) -> bool:
        self.fence = int(lease["spec"].get("leaseTransitions") or 0) + 1
        lease["spec"].update(leaseTransitions=self.fence, acquireTime=self._stamp())
        return await self._write(lease, self._holder)

    async def _read(self) -> Body:
        return await asyncio.to_thread(self._api.get, LEASE)

    async def _write(self, lease: Body, holder: str) -> bool:
        lease["spec"].update(holderIdentity=holder, leaseDurationSeconds=DURATION_S, renewTime=self._stamp())
        try:
            await asyncio.to_thread(self._api.put, LEASE, lease)
        except Conflict:
            return False
        return True

    def _stamp(self) -> str:
        return self._now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
