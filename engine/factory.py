"""From a model directory to a running engine, in two steps: load it, then open it over memory that somebody allocated.

The same for every worker. In between, a caller learns from the layout how much memory is needed. Knows no network.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch

from core.clock import Clock
from core.errors import ConfigError
from core.hashing import Namespace, PageHasher, fingerprint
from core.ids import Incarnation, WorkerId
from core.kv import KVLayout
from core.worker import Registration, Role
from core.worker_config import ModelSection, WorkerSection
from engine.cache.kv_memory import Buffer, KVMemory, region_sizes
from engine.config import (
    MIN_PAGES,
    CapacityPlan,
    EngineConfig,
    SpeculationConfig,
    check_image_room,
    fitting_pages,
    plan_capacity,
)
from engine.device import free_bytes, make_current, memory_report, resolve_device
from engine.engine import Engine
from engine.engine_thread import EngineThread
from engine.events import EventSink
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.vocabulary import read_definition
from engine.kernels.vendors.table import providers_for
from engine.models.drafter import SpeculativeModel
from engine.models.model import Model
from engine.models.registry import load_model
from engine.runner.model_runner import ModelRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model and everything that follows from it and the engine's configuration."""

    model: Model
    directory: Path
    """Where it was loaded from."""
    config: EngineConfig
    layout: KVLayout
    capacity: CapacityPlan
    namespace: bytes
    """`Namespace.encode()`: what its cached pages mean."""
    num_drafts: int = 0
    """Tokens that its drafter proposes at a time; 0: no speculation."""

    @property
    def device(self) -> torch.device:
        """Where its weights lie and its KV must."""
        return self.model.device

    @property
    def gpu(self) -> int | None:
        """Which GPU that is; None: none."""
        return None if self.device.type == "cpu" else self.device.index

    @property
    def fingerprint(self) -> bytes:
        """Peers exchange requests and KV only if theirs is equal."""
        return fingerprint(self.namespace, f"drafts={self.num_drafts}" if self.num_drafts else "")

    def report(self) -> list[str]:
        """Return what fits and what memory it takes, for people, one fact a line; asked once the KV pool is there."""
        lines = self.capacity.lines()
        return lines if self.device.type == "cpu" else lines + memory_report(self.device, sum(self.region_sizes))

    @property
    def region_sizes(self) -> list[int]:
        """Bytes of each KV region."""
        return region_sizes(self.layout)

    def registration(
        self,
        role: Role,
        section: WorkerSection,
        *,
        incarnation: Incarnation,
        secret_check: bytes,
        transports: Sequence[str],
        prefill_mode: str = "remote",
    ) -> Callable[[str, str], Registration]:
        """Return what makes the registration once the ports are bound: (address, http_address) -> Registration."""
        facts = self.model.facts
        return lambda address, http_address: Registration(
            worker_id=WorkerId(section.id),
            incarnation=incarnation,
            role=role,
            model=facts.name,
            address=address,
            http_address=http_address,
            namespace=self.namespace,
            fingerprint=self.fingerprint,
            secret_check=secret_check,
            page_tokens=self.config.page_tokens,
            num_pages=self.config.num_pages,
            num_rows=self.config.num_rows,
            max_tokens_total=self.capacity.max_tokens_total,
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
            prefill_mode=prefill_mode,
            transports=tuple(transports),
            domain=section.domain,
            replay_tokens=facts.reuse.replay_tokens,
        )


def load(section: ModelSection, config: EngineConfig) -> LoadedModel:
    """Load a model and plan its capacity; raises `ConfigError` (also `CheckpointError`). Blocks for as long as it takes."""
    if section.threads:
        config = msgspec.structs.replace(config, threads=section.threads)
    device = resolve_device(section.device)
    make_current(device)
    model = load_model(
        Path(section.path),
        name=section.name or None,
        dtype=section.dtype or None,
        mode=section.mode or None,
        device=device,
        providers=providers_for(config.kernels, device, deterministic=config.deterministic),
        verify=section.verify,
    )
    facts = model.facts
    check_image_room(config, facts)
    if not config.num_pages and model.device.type != "cpu":
        one = model.kv_layout(MIN_PAGES, config.num_rows, config.page_tokens)
        pages = fitting_pages(one, free_bytes(model.device)[0], config.memory_share)
        config = msgspec.structs.replace(config, num_pages=pages)
    layout = model.kv_layout(config.num_pages or MIN_PAGES, config.num_rows, config.page_tokens)
    namespace = Namespace(
        model=facts.name,
        revision=facts.revision,
        tokenizer=facts.tokenizer_digest,
        kv_dtype=facts.kv_dtype,
        page_tokens=config.page_tokens,
        mode=facts.mode,
    )
    return LoadedModel(
        model=model,
        directory=Path(section.path),
        config=config,
        layout=layout,
        capacity=plan_capacity(config, layout, facts.max_positions),
        namespace=namespace.encode(),
        num_drafts=drafts_of(model, config.speculation),
    )


def drafts_of(model: Model, speculation: SpeculationConfig) -> int:
    """Return how many tokens the model's drafter proposes at a time, 0 without speculation; raises `ConfigError`."""
    if speculation.mode == "off":
        return 0
    if isinstance(model, SpeculativeModel):
        return model.num_drafts
    if speculation.mode != "auto":
        raise ConfigError(
            f"speculation.mode = {speculation.mode}, but {model.facts.name} has no drafter; set it to auto or off",
            param="engine.speculation.mode",
        )
    return 0


def open_engine(
    loaded: LoadedModel,
    buffers: Sequence[Buffer],
    *,
    secret: bytes,
    sink: EventSink,
    clock: Clock,
    on_crash: Callable[[BaseException], None],
) -> EngineThread:
    """Build engine and runner over `buffers`, one per region, which must outlive the returned thread. Not started yet."""
    make_current(loaded.device)
    facts = loaded.model.facts
    grammars = GrammarCompiler(
        partial(read_definition, loaded.directory),
        loaded.config.grammar,
        vocab_size=facts.vocab_size,
        stop_ids=facts.eos_token_ids,
    )
    engine = Engine(
        config=loaded.config,
        facts=facts,
        layout=loaded.layout,
        hasher=PageHasher(secret, loaded.namespace, loaded.config.page_tokens),
        clock=clock,
        num_drafts=loaded.num_drafts,
    )
    kv = KVMemory(loaded.layout, buffers)
    runner = ModelRunner(loaded.model, kv, loaded.config, loaded.capacity.max_pages, grammars)
    return EngineThread(engine=engine, runner=runner, sink=sink, clock=clock, grammars=grammars, on_crash=on_crash)
