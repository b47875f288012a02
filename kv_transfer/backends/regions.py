"""The registered regions of one transport, and the checks that every embedded backend makes alike."""

from collections.abc import Mapping

from core.errors import BadRequest, ConfigError
from kv_transfer.api import MemoryRegion, Records
from kv_transfer.device import Cuda
from kv_transfer.plan import check_bounds
from kv_transfer.views import Bytes, views_of


class RegionTable:
    """Regions by id, with their bytes. Filled before use, read from any thread."""

    def __init__(self, cuda: Cuda | None = None) -> None:
        self.regions: dict[int, MemoryRegion] = {}
        self.views: dict[int, Bytes] = {}
        """Without `cuda` only of regions in host memory."""
        self._cuda = cuda

    def add(self, region: MemoryRegion) -> None:
        """Register; raises ConfigError for zero length, a known id, or overlap."""
        if region.nbytes <= 0:
            raise ConfigError(f"KV region {region.id} is empty")
        if region.id in self.regions:
            raise ConfigError(f"KV region {region.id} is registered already")
        for other in self.regions.values():
            if region.address < other.address + other.nbytes and other.address < region.address + region.nbytes:
                raise ConfigError(f"KV regions {region.id} and {other.id} overlap")
        self.regions[region.id] = region
        self.views |= views_of([region], self._cuda)

    def check(self, records: Records, source: Mapping[int, int]) -> None:
        """Raise BadRequest unless a read of `records` from regions of these sizes into ours stays inside both."""
        target = self.regions.get(records.target_region)
        if target is None or not target.writable:
            raise BadRequest(f"there is no writable local region {records.target_region}")
        if records.source_region not in source:
            raise BadRequest(f"the peer has no region {records.source_region}")
        check_bounds(records, source[records.source_region], target.nbytes)
