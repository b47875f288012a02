"""Which op is wrong inside a step? Every op of v41-mini runs beside its reference on the same inputs.

Layers amplify: a value on a rounding border becomes another code. What is compared here never went through two ops.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.v41_driver import RowsDriver
from benchmarks.v41_equality import GPU, facts_of, text
from benchmarks.v41_parts import RandomParts
from engine.kernels.ops import REFERENCE, Op
from engine.models.deepseek_v41.device.model import DeviceDeepseekModel
from engine.models.deepseek_v41.device.ops import Ops
from engine.models.deepseek_v41.parse import parse_config
from engine.models.deepseek_v41.presets import mini_config

Seen = dict[str, dict[str, float]]
STEPS = {
    "prompts": ([0, 1], [0, 0], (1200, 64)),
    "decode and verify": ([0, 1], [1200, 64], (1, 6)),
    "decode": (list(range(64)), [900] * 64, (1,) * 64),
}
"""Engine rows, tokens before, tokens of each."""


def _difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the relative size of the difference; of bytes and numbers of things, the share that differs."""
    if not got.is_floating_point():
        return float((got != want).double().mean()) if got.numel() else 0.0
    a, b = got.double(), want.double()
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0.0, a - b).norm() / b.nan_to_num(0, 0, 0).norm().clamp(min=1e-30))


def shadowed(name: str, op: Op, seen: Seen) -> Op:
    """Return an op that also runs its reference, on copies, and notes how far what it returns and writes is off."""
    reference = REFERENCE.load(name)

    def run(*args: Any, **keywords: Any) -> Any:
        copies = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
        want, got = reference(*copies, **keywords), op(*args, **keywords)
        pairs = [(a, b) for a, b in zip(args, copies, strict=True) if isinstance(a, torch.Tensor)]
        if got is not None:
            one = isinstance(got, torch.Tensor)
            pairs += [(got, want)] if one else list(zip(got, want, strict=True))
        worst = max(_difference(a, b) for a, b in pairs)
        row = seen.setdefault(name, {"calls": 0.0, "worst": 0.0})
        row["calls"] += 1
        row["worst"] = max(row["worst"], worst)
        return got

    return run


def shadow(device: torch.device = GPU, raw: Callable[[], dict[str, Any]] = mini_config) -> dict[str, object]:
    """Run steps of every kind, each op beside its reference."""
    config = parse_config(raw())
    model = DeviceDeepseekModel(config, RandomParts(config, device).model(), facts_of(config))
    driver = RowsDriver(model, 64, 1536, random_kv=True)
    plain = model.ops(256)
    found: dict[str, object] = {}
    for step, (rows, start, lengths) in STEPS.items():
        seen: Seen = {}
        wrapped = {
            field.name: shadowed(field.name, getattr(plain, field.name), seen)
            for field in dataclasses.fields(Ops) if field.name != "captured"
        }  # fmt: skip
        model._ops[256] = dataclasses.replace(plain, **wrapped)  # noqa: SLF001
        tokens = [text(i, length, config.vocab_size) for i, length in enumerate(lengths)]
        driver.run(driver.batch(rows, start, tokens, [[-1, -1, -1]] * len(rows)))
        found[step] = dict(sorted(seen.items(), key=lambda item: -item[1]["worst"]))
        for name, row in seen.items():
            print(f"{step}: {name} {row['calls']:.0f} calls, at worst {row['worst']:.3g}", flush=True)
    return found
