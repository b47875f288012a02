"""What every backend is opened with: the configuration and who we are."""

from dataclasses import dataclass

from core.ids import Incarnation
from kv_transfer.config import TransferConfig
from kv_transfer.device import Cuda
from kv_transfer.exchange import Exchange


@dataclass(frozen=True, slots=True)
class TransportSettings:
    """Settings of the transports of one process. Only loopback needs the exchange."""

    incarnation: Incarnation
    config: TransferConfig
    exchange: Exchange | None = None
    cuda: Cuda | None = None
    """Moves the bytes of regions on a device; given by whoever allocated them. None: there are none."""
