"""From a model directory to a running engine."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.clock import SystemClock
from core.errors import CheckpointError, ConfigError
from core.request import GenerateRequest, SamplingParams, StopRules
from core.worker_config import ModelSection
from engine.cache.kv_memory import anonymous_buffers
from engine.config import EngineConfig, SpeculationConfig
from engine.factory import drafts_of, load, open_engine
from engine.loop_sink import LoopSink
from engine.models.builtin import prepare_scripted
from engine.models.registry import load_model
from engine.models.script import ScriptedConfig, scripted_reply
from tests.fakes.drafting import DraftingModel

MODEL = ScriptedConfig(mean_length=1000)


@pytest.fixture
def directory(tmp_path):
    torch.set_num_threads(1)
    return str(prepare_scripted(tmp_path, MODEL))


def test_what_follows_from_a_model_is_planned_before_memory_is_taken(directory):
    loaded = load(ModelSection(path=directory, name="m", threads=2), EngineConfig(num_pages=33, page_tokens=8))
    assert loaded.model.facts.name == "m"
    assert loaded.config.threads == 2
    assert loaded.capacity.max_tokens_total == 32 * 8
    assert loaded.region_sizes == [len(buffer) for buffer in anonymous_buffers(loaded.layout)]


def test_equal_models_have_equal_fingerprints_and_other_page_sizes_other_ones(directory):
    small, large, again = (
        load(ModelSection(path=directory), EngineConfig(page_tokens=size, num_pages=pages)).fingerprint
        for size, pages in ((8, 64), (16, 64), (8, 32))
    )
    assert small == again != large


def test_a_missing_model_and_an_impossible_capacity_are_plain_errors(directory):
    with pytest.raises(CheckpointError, match="nowhere"):
        load(ModelSection(path="/nowhere"), EngineConfig())
    with pytest.raises(ConfigError, match="chunk_tokens"):
        load(ModelSection(path=directory), EngineConfig(chunk_tokens=4))


async def test_an_opened_engine_answers(directory):
    loaded = load(ModelSection(path=directory), EngineConfig(num_pages=33))
    sink = LoopSink(asyncio.get_running_loop(), pytest.fail)
    tokens, done = [], asyncio.Event()

    def on_step(events):
        tokens.extend(events.tokens.tolist())
        if events.finished:
            done.set()

    sink.connect(on_step, lambda batch: None)
    engine = open_engine(
        loaded,
        anonymous_buffers(loaded.layout),
        secret=b"s" * 16,
        sink=sink,
        clock=SystemClock(),
        on_crash=lambda error: done.set(),
    )
    engine.start()
    prompt = tuple(b"any prompt")
    request = GenerateRequest(
        request_id="r",
        model="m",
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(temperature=0.0),
        stop=StopRules(max_tokens=9),
    )
    await engine.call(lambda e: e.submit(request, SystemClock().now() + 60))
    await asyncio.wait_for(done.wait(), 30)
    await engine.stop()
    assert tokens == scripted_reply(MODEL, prompt, 9)


def test_drafts_follow_from_the_model_and_the_setting(directory):
    loaded = load(ModelSection(path=directory), EngineConfig())
    assert loaded.num_drafts == 0
    drafting = DraftingModel(loaded.model, [], num_drafts=3)
    found = {
        mode: drafts_of(drafting, SpeculationConfig(mode=mode)) for mode in ("auto", "static", "confidence", "off")
    }
    assert found == {"auto": 3, "static": 3, "confidence": 3, "off": 0}
    with pytest.raises(ConfigError, match="no drafter"):
        drafts_of(loaded.model, SpeculationConfig(mode="static"))


def test_workers_with_other_drafts_have_other_fingerprints(directory):
    loaded = load(ModelSection(path=directory), EngineConfig())
    assert replace(loaded, num_drafts=5).fingerprint != loaded.fingerprint


def test_without_a_number_of_pages_a_gpu_gets_as_many_as_fit_and_reports_them(directory, monkeypatch):
    gpu, here = torch.device("cuda", 0), load_model(Path(directory))
    here.device = gpu  # where it says it is; its layout does not depend on it
    monkeypatch.setattr("engine.factory.load_model", lambda *_, **__: here)
    monkeypatch.setattr("engine.factory.resolve_device", lambda text: gpu)
    monkeypatch.setattr("engine.factory.make_current", lambda device: None)
    monkeypatch.setattr("engine.factory.free_bytes", lambda device: (10 << 20, 20 << 20))
    monkeypatch.setattr("engine.factory.memory_report", lambda device, kv_bytes: [f"{device} {kv_bytes}"])
    section = ModelSection(path=directory, device="cuda")
    loaded = load(section, EngineConfig(num_pages=0, memory_share=0.5))
    assert loaded.gpu == 0
    size = sum(loaded.region_sizes)
    page = loaded.capacity.bytes_per_page
    assert (5 << 20) - page - 8192 <= size <= 5 << 20
    assert loaded.config.num_pages == loaded.layout.components[0].num_records
    assert loaded.report()[-1] == f"cuda:0 {size}"
    assert load(section, EngineConfig(num_pages=33)).config.num_pages == 33
