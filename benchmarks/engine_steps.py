"""The time of one engine step of a Llama-8B-shaped random model on a GPU, beside what moving its bytes takes.

Decode steps go straight through the executor (`steps`) and under the scheduler (`loop`); prefill steps are chunks of one
or several rows. A floor is weight bytes plus KV bytes over the copy bandwidth that the same run measured.
"""

import itertools
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.engine_driver import Ask, EngineDriver
from benchmarks.kernel_timing import copy_bandwidth, matmul_flops
from core.request import SamplingParams
from engine.cache.kv_memory import KVMemory, region_sizes
from engine.config import EngineConfig, GraphsConfig
from engine.layers.embedding import Embedding
from engine.layers.linear import DEVICE_ROW_TILE, Linear
from engine.layers.rotary import RopeScaling
from engine.models.config import LlamaConfig
from engine.models.llama_device import DeviceLayer, DeviceLlamaModel, DeviceWeights
from engine.models.llama_layout import FULL
from engine.models.model import ModelFacts
from engine.plan import Plan, PlanExtra, RowInit
from engine.runner.device_executor import DeviceExecutor, PendingStep

SHAPE = LlamaConfig(
    architecture="LlamaForCausalLM", vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=32,
    num_heads=32, num_kv_heads=8, head_dim=128, max_positions=16_384, norm_eps=1e-5, rope_theta=500_000.0,
    rope_scaling=RopeScaling(), tied_head=False, qkv_bias=False, output_bias=False, mlp_bias=False, windows=(0,) * 32,
    eos_token_ids=(), dtype="bf16",
)  # fmt: skip
PAGE = 64
POOL_TOKENS = 64 * 8192
DECODE = ((1, 8192), (8, 8192), (64, 8192), (256, 2048))
PREFILL = ((1, 8192, 0), (4, 2048, 0), (1, 2048, 0), (1, 2048, 6144))
"""Rows, tokens each, tokens in KV before."""
STEPS, WARM = 40, 6
GREEDY = SamplingParams(temperature=0.0)
CHOICES = {
    "greedy": GREEDY,
    "temperature": SamplingParams(temperature=0.8, seed=1),
    "top-p 0.9": SamplingParams(temperature=0.8, seed=1, top_p=0.9),
    "top-k 40": SamplingParams(temperature=0.8, seed=1, top_k=40),
    "5 log-probabilities": SamplingParams(temperature=0.0, num_logprobs=5),
}


def random_model(device: torch.device) -> DeviceLlamaModel:
    """Return the model with random weights, small enough that nothing overflows."""
    c, d = SHAPE, SHAPE.head_dim

    def linear(rows: int, columns: int) -> Linear:
        weight = torch.empty(rows, columns, dtype=torch.bfloat16, device=device).normal_(0, columns**-0.5)
        return Linear(weight, row_tile=DEVICE_ROW_TILE)

    def norm() -> torch.Tensor:
        return torch.ones(c.hidden_size, dtype=torch.bfloat16, device=device)

    layers = tuple(
        DeviceLayer(
            qkv=linear((c.num_heads + 2 * c.num_kv_heads) * d, c.hidden_size),
            output=linear(c.hidden_size, c.num_heads * d),
            gate_up=linear(2 * c.intermediate_size, c.hidden_size),
            down=linear(c.hidden_size, c.intermediate_size),
            input_norm=norm(), post_norm=norm(), component=FULL, index=i,
        )
        for i in range(c.num_layers)
    )  # fmt: skip
    table = torch.empty(c.vocab_size, c.hidden_size, dtype=torch.bfloat16, device=device).normal_()
    weights = DeviceWeights(Embedding(table), layers, norm(), linear(c.vocab_size, c.hidden_size))
    facts = ModelFacts(
        name="random-8b", revision="0", tokenizer_digest="0", vocab_size=c.vocab_size, max_positions=c.max_positions,
        eos_token_ids=(), kv_dtype="bf16",
    )  # fmt: skip
    return DeviceLlamaModel(c, facts, weights, torch.bfloat16, device)


def block_parameters() -> int:
    """Return the parameters that every token is multiplied with, without the output head."""
    c = SHAPE
    heads = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    return c.num_layers * c.hidden_size * (heads + 3 * c.intermediate_size)


def weight_bytes() -> int:
    """Return the bytes that a decode step reads of the weights."""
    return 2 * (block_parameters() + SHAPE.vocab_size * SHAPE.hidden_size)


KV_BYTES = 2 * 2 * SHAPE.num_kv_heads * SHAPE.head_dim * SHAPE.num_layers
"""Of one token."""


def floors(rows: int, context: int, limits: dict[str, float]) -> tuple[float, float]:
    """Return microseconds of a decode step's bytes, and of its KV bytes plus its products or their weights' bytes."""
    keys, weights = rows * context * KV_BYTES / limits["copy"], weight_bytes() / limits["copy"]
    return (keys + weights) * 1e6, (keys + max(weights, rows * weight_bytes() / limits["bf16"])) * 1e6


class Watch:
    """Launches steps of an executor and notes when the device began and ended each, and how long the host took."""

    def __init__(self, executor: DeviceExecutor) -> None:
        self._executor = executor
        self._launch = executor.launch
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._host: list[float] = []

    def launch(self, plan: Plan) -> PendingStep:
        """As `DeviceExecutor.launch`."""
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun = time.perf_counter()
        with self._executor._stream.active():  # noqa: SLF001
            pair[0].record()
            pending = self._launch(plan)
            pair[1].record()
        self._host.append(time.perf_counter() - begun)
        self._marks.append(pair)
        return pending

    def facts(self) -> dict[str, float]:
        """Return medians in microseconds: idle before a step, at most idle, in a step, and of the host to launch one."""
        torch.cuda.synchronize()
        idle = [a[1].elapsed_time(b[0]) * 1e3 for a, b in itertools.pairwise(self._marks)]
        return {
            "device_idle_before_a_step_us": statistics.median(idle),
            "device_idle_before_a_step_us_max": max(idle),
            "device_in_a_step_us": statistics.median(a.elapsed_time(b) for a, b in self._marks) * 1e3,
            "host_launch_us": statistics.median(self._host) * 1e6,
        }


class Stepper:
    """Plans straight into an executor, over a pool full of random keys and values."""

    def __init__(self, model: DeviceLlamaModel, memory: KVMemory, **settings: object) -> None:
        base = {"page_tokens": PAGE, "num_pages": POOL_TOKENS // PAGE + 1, "num_rows": 256, "chunk_tokens": 8192}
        config = EngineConfig(**{**base, "deterministic": False, **settings})
        begun = time.perf_counter()
        self.executor = DeviceExecutor(model, memory, config, SHAPE.max_positions // PAGE)
        self.start_s = time.perf_counter() - begun
        self._pages = 1 + np.random.default_rng(5).permutation(POOL_TOKENS // PAGE)
        self._step = 0

    def plan(
        self, rows: int, start: int, tokens: int | None = None, context: int = 0, sampling: SamplingParams = GREEDY
    ) -> Plan:
        """Return a decode step (`tokens` None) or chunks; with `context` the rows are set up for so many tokens."""
        self._step += 1
        each = 1 if tokens is None else tokens
        deltas, inits = np.zeros((0, 3), np.int32), ()
        if context:
            width = -(-context // PAGE)
            row, column = np.divmod(np.arange(rows * width), width)
            deltas = np.stack((row, column, self._pages[: rows * width]), 1).astype(np.int32)
            inits = tuple(
                RowInit(
                    row=i, generation=0, sampling=sampling, token_ids=b"", num_prompt_tokens=0, min_tokens=0,
                    masked_until_min=(), next_token=17 + i,
                )
                for i in range(rows)
            )  # fmt: skip
        return Plan(
            step=self._step, rows=np.arange(rows, dtype=np.int32), gens=np.zeros(rows, np.uint32),
            q_start=np.arange(rows + 1, dtype=np.int32) * each, seq_start=np.full(rows, start, np.int32),
            use_next=np.full(rows, tokens is None, np.uint8), sample=np.ones(rows, np.uint8),
            tokens=np.random.default_rng(self._step).integers(0, SHAPE.vocab_size, rows * each, np.int32),
            table_deltas=deltas, extra=PlanExtra(inits=inits),
        )  # fmt: skip

    def run(self, plans: Sequence[Plan]) -> tuple[float, "Watch"]:
        """Run steps, two in flight; returns wall seconds of one, and what was seen of the device."""
        pending: list[PendingStep] = []
        watch = Watch(self.executor)
        begun = time.perf_counter()
        for plan in plans:
            pending.append(watch.launch(plan))
            if len(pending) == 2:
                pending.pop(0).result()
        while pending:
            pending.pop(0).result()
        wall = (time.perf_counter() - begun) / len(plans)
        return wall, watch

    def decode(self, rows: int, context: int, sampling: SamplingParams = GREEDY) -> tuple[float, "Watch"]:
        """Time decode steps at a context."""
        first = context - WARM - STEPS - 1
        self.run(
            [self.plan(rows, first, None, context, sampling), *(self.plan(rows, first + i) for i in range(1, WARM))]
        )
        return self.run([self.plan(rows, first + WARM + i) for i in range(STEPS)])

    def replay_us(self, rows: int) -> float:
        """Return device microseconds of the recorded step that was staged last."""
        graphs = self.executor._graphs  # noqa: SLF001
        shape = graphs.shape(rows)
        with self.executor._stream.active():  # noqa: SLF001
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(10):
                graphs.replay(shape)
            end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 100


def _kernels(stepper: Stepper, rows: int, context: int) -> list[dict[str, object]]:
    """Return where the device's time of a decode step goes, most first."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        stepper.run([stepper.plan(rows, context - 20 + i) for i in range(4)])
    found = sorted(profile.key_averages(), key=lambda e: -e.device_time_total)[:12]
    return [{"kernel": e.key[:90], "us_a_step": e.device_time_total / 4, "calls_a_step": e.count / 4} for e in found]


def _pool(model: DeviceLlamaModel) -> KVMemory:
    layout = model.kv_layout(POOL_TOKENS // PAGE + 1, 256, PAGE)
    buffers = [torch.empty(size, dtype=torch.uint8, device=model.device) for size in region_sizes(layout)]
    for buffer in buffers:
        for piece in buffer.view(torch.bfloat16).split(1 << 30):
            piece.normal_()
    return KVMemory(layout, buffers)


def steps() -> dict[str, object]:
    """Measure decode and prefill steps, with and without recordings."""
    device = torch.device("cuda", 0)
    limits = {"copy": copy_bandwidth(), **matmul_flops()}
    torch.cuda.empty_cache()
    print({k: f"{v:.4g}" for k, v in limits.items()}, flush=True)
    model = random_model(device)
    memory = _pool(model)
    result: dict[str, object] = {"limits_per_s": limits, "weight_bytes": weight_bytes(), "kv_bytes_a_token": KV_BYTES}
    stepper = Stepper(model, memory)
    result["start_s_with_recording"] = stepper.start_s
    plain = Stepper(model, memory, graphs=GraphsConfig(enabled=False))
    fixed = Stepper(model, memory, deterministic=True, graphs=GraphsConfig(tiers=(1, 8, 64)))
    decode: list[dict[str, object]] = []
    for rows, context in DECODE:
        floor, bound = floors(rows, context, limits)
        wall, watch = stepper.decode(rows, context)
        row = {"rows": rows, "context": context, "floor_us": floor, "floor_with_products_us": bound,
               "step_us": wall * 1e6, "of_floor": floor / wall / 1e6, "of_floor_with_products": bound / wall / 1e6,
               **watch.facts(),
               "recorded_part_us": stepper.replay_us(rows), "recording_off_us": plain.decode(rows, context)[0] * 1e6,
               "deterministic_us": fixed.decode(rows, context)[0] * 1e6}  # fmt: skip
        decode.append(row)
        print({k: round(v, 3) for k, v in row.items()}, flush=True)
    result["decode"] = decode
    result["choices_step_us_256_rows"] = {n: stepper.decode(256, 2048, s)[0] * 1e6 for n, s in CHOICES.items()}
    print(result["choices_step_us_256_rows"], flush=True)
    result["kernels"] = {f"{r} x {c}": _kernels(stepper, r, c) for r, c in (DECODE[0], DECODE[2], DECODE[3])}
    for title, rows_of in result["kernels"].items():
        print(
            title, *(f"{r['us_a_step']:9.1f} us {r['calls_a_step']:6.1f} x {r['kernel']}" for r in rows_of), sep="\n  "
        )
    result["prefill"] = [_prefill(plain, limits, *size) for size in PREFILL]
    return result


def _prefill(stepper: Stepper, limits: dict[str, float], rows: int, tokens: int, before: int) -> dict[str, object]:
    c = SHAPE
    stepper.run([stepper.plan(rows, before, tokens, before + tokens)])
    wall = min(stepper.run([stepper.plan(rows, before, tokens)])[0] for _ in range(4))
    pairs = rows * tokens * (before + tokens / 2)
    flops = 2.0 * rows * (tokens * block_parameters() + c.vocab_size * c.hidden_size)
    flops += 4.0 * pairs * c.num_heads * c.head_dim * c.num_layers
    row: dict[str, object] = {"rows": rows, "tokens_each": tokens, "before": before, "ms": wall * 1e3,
                              "tokens_per_s": rows * tokens / wall, "tflops": flops / wall / 1e12,
                              "of_bf16_peak": flops / wall / limits["bf16"]}  # fmt: skip
    print({k: round(v, 3) for k, v in row.items()}, flush=True)
    return row


def loop() -> dict[str, object]:
    """Measure steps under the scheduler: wall time of a pass while all rows decode, and what the host did in it."""
    limits = {"copy": copy_bandwidth(), **matmul_flops()}
    torch.cuda.empty_cache()
    model = random_model(torch.device("cuda", 0))
    result: dict[str, object] = {"limits_per_s": limits}
    for rows in (8, 64, 256):
        prompt, outputs = 512, 160
        config = EngineConfig(
            page_tokens=PAGE, num_pages=rows * (-(-(prompt + outputs) // PAGE) + 1) + 16, num_rows=rows,
            chunk_tokens=8192, deterministic=False, graphs=GraphsConfig(tiers=(rows,)),
        )  # fmt: skip
        driver = EngineDriver(model, config)
        rng = np.random.default_rng(rows)
        begun = time.perf_counter()
        for _ in range(rows):
            driver.submit(Ask(rng.integers(0, SHAPE.vocab_size, prompt).tolist(), outputs, GREEDY))
        while len(driver.sink.tokens) < rows or min(map(len, driver.sink.tokens.values())) < 8:
            driver.loop.turn()
        filled = time.perf_counter() - begun
        context = prompt + statistics.median(map(len, driver.sink.tokens.values()))
        executor = driver.runner._executor  # noqa: SLF001
        assert isinstance(executor, DeviceExecutor)
        watch = Watch(executor)
        executor.launch = watch.launch  # type: ignore[method-assign]
        times, turns = driver.loop.times, 60
        waited, begun = times.collect_wait, time.perf_counter()
        for _ in range(turns):
            driver.loop.turn()
        wall = time.perf_counter() - begun
        row = {"step_us": wall / turns * 1e6, "waited_for_device_us": (times.collect_wait - waited) / turns * 1e6,
               "floor_us": floors(rows, int(context) + turns // 2, limits)[0], "context": context, "prompt": prompt,
               "filled_s": filled, "prefill_tokens_per_s_while_filling": rows * prompt / filled, **watch.facts()}  # fmt: skip
        row["host_us"] = row["step_us"] - row["waited_for_device_us"]
        result[str(rows)] = row
        print(rows, row, flush=True)
        driver.close()
        del driver
        torch.cuda.empty_cache()
    return result
