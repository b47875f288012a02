"""A real model under the engine, driven pass by pass: for equality tests over chunking, batching, hits and hand-overs."""

import functools
import tempfile
from pathlib import Path

import msgspec
import numpy as np
import torch

from core.clock import ManualClock
from core.kv import ComponentKind
from engine.barrier import SoloBarrier
from engine.cache.kv_memory import KVMemory, anonymous_buffers
from engine.config import EngineConfig, GrammarConfig
from engine.engine import Engine
from engine.factory import drafts_of
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.vocabulary import read_definition
from engine.loop import StepLoop
from engine.models.builtin import prepare_builtin
from engine.models.byte_tokenizer import write_byte_tokenizer
from engine.models.config import parse_llama
from engine.models.llama_device import DeviceLlamaModel, build_device_weights
from engine.models.loader import DTYPES, Checkpoint
from engine.models.registry import load_model
from engine.runner.device_executor import DeviceExecutor
from engine.runner.device_stream import ImmediateStream
from engine.runner.model_runner import ModelRunner
from tests.fakes.engine_rig import Collector, ListInbox, announced_from, hasher_of, request_of

FAR = 1e9


@functools.cache
def model_of(name):
    """A built-in model, loaded once per process; "name:dtype:mode" asks for more than its defaults."""
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp(prefix="tandem-models-")
    name, dtype, mode = (*name.split(":"), "", "")[:3]
    return load_model(prepare_builtin(name, Path(folder)), dtype=dtype or None, mode=mode or None)


@functools.cache
def device_model_of(name):
    """A built-in Llama in the form that runs on a GPU, on host memory with the reference ops."""
    folder = prepare_builtin(name, Path(tempfile.mkdtemp(prefix="tandem-models-")))
    model, raw = model_of(name), msgspec.json.decode((folder / "config.json").read_bytes())
    config, dtype = parse_llama(raw, folder), DTYPES[model.facts.kv_dtype]
    weights = build_device_weights(config, Checkpoint(folder, dtype), model.device)
    return DeviceLlamaModel(config, model.facts, weights, dtype, model.device)


def grammars_of(model):
    """A compiler over the byte vocabulary of the generated models."""
    with tempfile.TemporaryDirectory() as folder:
        write_byte_tokenizer(Path(folder), model.facts.vocab_size)
        definition = read_definition(Path(folder))
    return GrammarCompiler(
        lambda: definition, GrammarConfig(), vocab_size=model.facts.vocab_size, stop_ids=model.facts.eos_token_ids
    )


class ModelRig:
    """Engine, model runner and loop; use as a context manager so that the executor thread ends."""

    def __init__(self, name, *, model=None, on_device=False, **settings):
        """`model`: run this one instead of the built-in model's own; `on_device`: with the executor of devices."""
        settings = {"page_tokens": 8, "num_pages": 64, "num_rows": 8, "chunk_tokens": 32, **settings}
        self.config = EngineConfig(**settings)
        self.model = model or model_of(name)
        self.layout = self.model.kv_layout(self.config.num_pages, self.config.num_rows, self.config.page_tokens)
        self.buffers = anonymous_buffers(self.layout)
        self.memory = KVMemory(self.layout, self.buffers)
        self.engine = Engine(
            config=self.config,
            facts=self.model.facts,
            layout=self.layout,
            hasher=hasher_of(self.config),
            clock=ManualClock(1.0),
            num_drafts=drafts_of(self.model, self.config.speculation),
        )
        self.grammars = grammars_of(self.model)
        max_pages, executor = self.engine.capacity.max_pages, None
        if on_device:
            executor = DeviceExecutor(
                self.model, self.memory, self.config, max_pages, grammars=self.grammars, stream=ImmediateStream()
            )
        self.runner = ModelRunner(self.model, self.memory, self.config, max_pages, self.grammars, executor=executor)
        self.sink = Collector()
        self.loop = StepLoop(
            engine=self.engine,
            runner=self.runner,
            inbox=ListInbox(),
            sink=self.sink,
            clock=ManualClock(1.0),
            barrier=SoloBarrier(),
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.runner.close()
        self.grammars.close()
        self.memory.close()

    def turn(self):
        worked = self.loop.turn()
        assert self.engine.audit() == []
        return worked

    def run(self, limit=5000):
        for _ in range(limit):
            if not self.turn():
                return
        raise AssertionError("still working")

    def submit(self, prompt, max_tokens, **fields):
        return self.engine.submit(request_of(prompt, max_tokens, **fields), FAR)

    def text(self, prompt, max_tokens, **fields):
        """Run one request alone (with whatever is cached) and return its tokens."""
        seq = self.submit(prompt, max_tokens, **fields)
        self.run()
        assert seq in self.sink.finished
        return self.sink.tokens[seq]

    def record(self, component, index):
        """The bytes of one record, writable."""
        buffer = np.frombuffer(self.buffers[component.region], np.uint8)
        begin = component.offset + index * component.stride_bytes
        return buffer[begin : begin + component.record_bytes]


def hand_over(source, target, request):
    """Prefill on one engine, copy the bytes, commit on the other; returns the destination's sequence id."""
    answers = []
    seq = target.engine.book(request, FAR, answers.append)
    target.turn()
    booking = answers[0]
    there = source.engine.submit_source(request, FAR)
    source.run()
    done = source.sink.prefilled[there]
    size = target.config.page_tokens
    chunks = source.sink.chunks[there]
    due = announced_from(request, booking.prefix_tokens, chunks[0].hits)
    for chunk in chunks:
        start = max(chunk.start, due)
        if start >= chunk.end:
            continue
        landed = []
        target.engine.land(seq, start, chunk.end, landed.append)
        target.turn()
        theirs = [ref.page for ref in chunk.pages][(start - chunk.start) // size :]
        for component in target.layout.components:
            if component.kind is ComponentKind.PAGED:
                for mine, other in zip(landed[0].pages, theirs, strict=True):
                    target.record(component, mine)[:] = source.record(component, other)
    for component in target.layout.components:
        if component.kind is not ComponentKind.PAGED:
            target.record(component, booking.row)[:] = source.record(component, done.row)
    assert source.engine.epochs_unchanged(there)
    source.engine.release(there)
    source.run()
    target.engine.commit(seq, done.first_tokens, done.logprobs, done.finish, done.num_cached_tokens, floors=done.floors)
    target.sink.tokens[seq] = list(done.first_tokens)
    target.sink.first_position[seq] = request.num_output_tokens
    return seq
