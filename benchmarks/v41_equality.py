"""Is V4.1 on a GPU what it is on a CPU? Layer by layer against the references of all ops, as a whole, in any batch, captured.

Random weights make a chaotic model: a value on a rounding border takes another code, an expert changes, and logits move
by whole units. So layers are compared each from the same input, and whole texts by how often they agree.
"""

import dataclasses

import numpy as np
import torch

from benchmarks.v41_driver import RowsDriver, captured
from benchmarks.v41_parts import RandomParts
from engine.cache.hit import ReuseKind, ReuseRule
from engine.kernels.ops import REFERENCE
from engine.models.deepseek_v41.arithmetic import arithmetic_of
from engine.models.deepseek_v41.config import V41Config
from engine.models.deepseek_v41.device.layer import Flow
from engine.models.deepseek_v41.device.memory import DeviceMemory
from engine.models.deepseek_v41.device.model import DeviceDeepseekModel
from engine.models.deepseek_v41.device.reading import read_parts
from engine.models.deepseek_v41.device.rows import DeviceStep
from engine.models.deepseek_v41.model import DeepseekModel
from engine.models.deepseek_v41.parse import parse_config
from engine.models.deepseek_v41.presets import mini_config, tiny_config
from engine.models.deepseek_v41.publish import published
from engine.models.deepseek_v41.random_weights import random_weights
from engine.models.model import ModelFacts

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def facts_of(config: V41Config) -> ModelFacts:
    """Return what the engine must know of a model without directory."""
    return ModelFacts(
        name="v41", revision="0", tokenizer_digest="0", vocab_size=config.vocab_size,
        max_positions=config.max_positions, eos_token_ids=(), kv_dtype="packed-f32", history_tokens=3,
        reuse=ReuseRule(kind=ReuseKind.NONE),
    )  # fmt: skip


def text(seed: int, length: int, vocab: int) -> list[int]:
    """Return random tokens."""
    return np.random.default_rng(seed).integers(3, vocab - 3, length).tolist()


class _Side:
    """One model's way through the layers of a step, one layer at a time."""

    def __init__(self, driver: RowsDriver) -> None:
        self.driver = driver
        self.model = driver.model

    def begin(self, batch: object) -> None:
        model = self.model
        self.step = DeviceStep(model.config, model.replay, batch, model._turns, model.device, ops=model.ops(256))  # noqa: SLF001
        self.memory = DeviceMemory(model.cache_map(256), self.driver.kv)
        self.run = model._shared(self.step, self.memory, model.ops(256), fixed=False)  # noqa: SLF001
        self.ngrams = self.step.ngrams()
        self.batch = batch

    def layer(self, number: int, flow: Flow) -> Flow:
        layer = self.model.layers[number]
        if layer.plan.has_engram:
            flow = layer.recall(flow, self.ngrams, self.model.parts.token_map, self.run)
        layer.attention.write_entries(flow.inputs, self.run)
        return layer.forward(flow, self.run)


def layers() -> dict[str, object]:
    """Compare every layer of v41-mini, kernels against references on the GPU, each from the same input."""
    config = parse_config(mini_config())
    parts = RandomParts(config, GPU).model()
    models = [
        DeviceDeepseekModel(config, parts, facts_of(config), **options) for options in ({}, {"providers": (REFERENCE,)})
    ]
    kernels, reference = (_Side(RowsDriver(model, 3, 1536)) for model in models)
    rows = []
    ids = [text(1, 1210, config.vocab_size), text(2, 70, config.vocab_size)]
    none = [-1, -1, -1]
    steps = (
        ("prompts", [0, 1], [0, 0], [ids[0][:1200], ids[1][:64]], [none, none]),
        (
            "decode and verify",
            [0, 1],
            [1200, 64],
            [ids[0][1200:1201], ids[1][64:70]],
            [ids[0][1197:1200], ids[1][61:64]],
        ),
    )
    with torch.inference_mode():
        for name, *what in steps:
            batch = kernels.driver.batch(*what)
            for side in (kernels, reference):
                side.begin(batch)
            flow = reference.model._embed(reference.step, batch, reference.run)  # noqa: SLF001
            for number in range(len(config.layers)):
                got = kernels.layer(number, flow)
                flow = reference.layer(number, flow)
                rows.append({"step": name, **_compared(number, got, flow, kernels, reference)})
                print(rows[-1], flush=True)
    worst = max(row["median"] for row in rows)
    return {"rows": rows, "worst_median": worst}


def _compared(number: int, got: Flow, want: Flow, kernels: _Side, reference: _Side) -> dict[str, object]:
    a, b = got.streams.float().flatten(1), want.streams.float().flatten(1)
    error = (a - b).norm(dim=1) / b.norm(dim=1)
    plan = kernels.model.config.layers[number]
    found: dict[str, object] = {
        "layer": number, "mode": plan.mode, "median": float(error.median()),
        "p99": float(error.quantile(0.99)), "rows_above_0.05": int((error > 0.05).sum()), "finite": bool(a.isfinite().all()),
        "window_bytes_differ": _differ(kernels.memory.windows[number], reference.memory.windows[number]),
    }  # fmt: skip
    if plan.owns_kv:
        ours, theirs = kernels.memory.owners[number], reference.memory.owners[number]
        found["entry_bytes_differ"] = _differ(ours.entries, theirs.entries)
        found["key_bytes_differ"] = _differ(ours.key_codes, theirs.key_codes)
    if plan.owns_index_query:
        ours, theirs = (side.run.selections.of(number) for side in (kernels, reference))
        found["selections_differ"] = float((ours != theirs).any(1).float().mean())
    return found


def _differ(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the share of bytes that differ among those that are not zero in both."""
    used = (a != 0) | (b != 0)
    return float((a != b).sum() / used.sum().clamp(min=1))


class _Memory(dict[str, torch.Tensor]):
    def get(self, name: str) -> torch.Tensor:  # type: ignore[override]
        return self[name]


def tiny() -> dict[str, object]:
    """Compare v41-tiny on the GPU with its device forward over references on the CPU, and with the CPU's own model."""
    config = parse_config(tiny_config())
    weights = random_weights(config, 3, torch.float32)
    source = _Memory(published(weights, config))
    token_map = torch.arange(config.vocab_size) % config.engram.compressed_vocab_size
    models = {
        "gpu": DeviceDeepseekModel(config, read_parts(source, config, GPU, token_map), facts_of(config)),
        "references": DeviceDeepseekModel(config, read_parts(source, config, CPU, token_map), facts_of(config)),
        "cpu": DeepseekModel(config, weights, facts_of(config), arithmetic_of(config), token_map=token_map),
    }
    result: dict[str, object] = {}
    for seed in (1, 2, 3):
        ids = text(seed, 64, config.vocab_size)
        logits = {}
        for name, model in models.items():
            driver = RowsDriver(model, 1, 256)  # type: ignore[arg-type]
            batch = driver.batch([0], [0], [ids], [[-1, -1, -1]], every=True)
            if name == "cpu":
                laid = batch.device_rows
                batch = dataclasses.replace(
                    batch, rows=laid.rows.numpy(), q_start=laid.q_start.numpy(), seq_start=laid.seq_start.numpy(),
                    device_rows=None, page_table=batch.page_table.long(),
                )  # fmt: skip
            logits[name] = driver.run(batch).float().cpu()
        row: dict[str, object] = {}
        for name in ("references", "cpu"):
            got, want = logits["gpu"], logits[name]
            margin = want.topk(2, dim=1).values
            wide = (margin[:, 0] - margin[:, 1]) > 1.0
            same = got.argmax(1) == want.argmax(1)
            row[name] = {
                "relative": float((got - want).norm() / want.norm()), "same_argmax": float(same.float().mean()),
                "rows_with_margin_above_1": int(wide.sum()), "same_of_those": int((same & wide).sum()),
                "rows_bitwise_close": int(((got - want).abs().amax(1) < 0.05).sum()),
            }  # fmt: skip
        result[f"text {seed}"] = row
        print(seed, row, flush=True)
    return result


def batches() -> dict[str, object]:
    """Compare a row's logits alone, in batches, in chunks and captured, bit by bit, with fixed tiles and with free ones."""
    config = parse_config(mini_config())
    model = DeviceDeepseekModel(config, RandomParts(config, GPU).model(), facts_of(config))
    ids = text(5, 700, config.vocab_size)
    none = [-1, -1, -1]
    result: dict[str, object] = {}
    for fixed in (True, False):
        driver = RowsDriver(model, 65, 1024)
        whole = driver.run(driver.batch([64], [0], [ids], [none], every=True, fixed=fixed))
        again = driver.run(driver.batch([64], [0], [ids], [none], every=True, fixed=fixed))
        driver.run(driver.batch([0], [0], [ids[:500]], [none], fixed=fixed))
        chunk = driver.run(driver.batch([0], [500], [ids[500:693]], [ids[497:500]], every=True, fixed=fixed))
        alone = driver.run(driver.batch([0], [693], [ids[693:694]], [ids[690:693]], fixed=fixed))
        verify = driver.run(driver.batch([0], [693], [ids[693:699]], [ids[690:693]], every=True, fixed=fixed))
        others = [text(r, 1, config.vocab_size) for r in range(1, 64)]
        batch = driver.batch(
            list(range(64)), [693] + [0] * 63, [ids[693:694], *others], [ids[690:693], *[none] * 63], fixed=fixed
        )
        among = driver.run(batch)[:1]
        graph, made = captured(driver, batch)
        graph.replay()
        torch.cuda.synchronize()
        pairs = {
            "twice": (again, whole), "chunk = one shot": (chunk, whole[500:693]), "decode = one shot": (alone, whole[693:694]),
            "verify = one shot": (verify, whole[693:699]), "in a batch of 64 = one shot": (among, whole[693:694]),
            "in a batch of 64 = alone": (among, alone), "captured = eager": (made[:1], among),
        }  # fmt: skip
        row = {
            name: {"bitwise": bool(torch.equal(a, b)), "rows_equal": int((a == b).all(1).sum()), "of": len(a),
                   "most": float((a - b).abs().max())}
            for name, (a, b) in pairs.items()
        }  # fmt: skip
        result["deterministic" if fixed else "free"] = row
        for name, values in row.items():
            print("fixed" if fixed else "free", name, values, flush=True)
    return result
