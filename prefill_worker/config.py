"""Configuration of a prefill worker, section by section; each section is declared beside its owner."""

import msgspec

from core.worker_config import DrainSection, ModelSection, WorkerSection
from engine.config import EngineConfig
from kv_transfer.config import TransferConfig


class PrefillWorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file of `python -m prefill_worker --config FILE`."""

    worker: WorkerSection
    model: ModelSection
    engine: EngineConfig = EngineConfig()
    transfer: TransferConfig = TransferConfig()
    drain: DrainSection = DrainSection()
