"""Configuration of a decode worker, section by section; each section is declared beside its owner."""

import msgspec

from core.worker_config import DrainSection, ModelSection, WorkerSection
from decode_worker.receiver import PrefillConfig
from decode_worker.streams import StreamConfig
from engine.config import EngineConfig
from kv_transfer.config import TransferConfig


class DecodeWorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file of `python -m decode_worker --config FILE`."""

    worker: WorkerSection
    model: ModelSection
    engine: EngineConfig = EngineConfig()
    transfer: TransferConfig = TransferConfig()
    prefill: PrefillConfig = PrefillConfig()
    stream: StreamConfig = StreamConfig()
    drain: DrainSection = DrainSection()
