"""Which op is wrong inside a step? Every op of v41-mini runs twice, and beside its reference, on the same inputs.

Layers amplify: a value on a rounding border becomes another code. What is compared here never went through two ops.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.v41_driver import PAGE, RowsDriver
from benchmarks.v41_equality import GPU, facts_of, text
from benchmarks.v41_parts import RandomParts
from engine.kernels.ops import REFERENCE, Op
from engine.models.deepseek_v41.device.model import DeviceDeepseekModel
from engine.models.deepseek_v41.device.ops import Ops, ops_of
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


def same(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor


def shadowed(name: str, op: Op, seen: Seen) -> Op:
    """Return an op that also runs again and by its reference, on copies, and notes how far they are off."""
    reference = REFERENCE.load(name)

    def outputs(made: Any, args: Sequence[Any]) -> list[torch.Tensor]:
        """Return what a call returned, then its tensors, some of which it writes into."""
        returned = () if made is None else (made,) if isinstance(made, torch.Tensor) else tuple(made)
        return [*returned, *(arg for arg in args if isinstance(arg, torch.Tensor))]

    def run(*args: Any, **keywords: Any) -> Any:
        first, second = ([same(arg) if isinstance(arg, torch.Tensor) else arg for arg in args] for _ in range(2))
        want, again = outputs(reference(*first, **keywords), first), outputs(op(*second, **keywords), second)
        got = op(*args, **keywords)
        ours = outputs(got, args)
        row = seen.setdefault(name, {"calls": 0.0, "worst": 0.0, "not_the_same_again": 0.0})
        row["calls"] += 1
        row["worst"] = max(row["worst"], *(_difference(a, b) for a, b in zip(ours, want, strict=True)))
        row["not_the_same_again"] += any(not torch.equal(_bits(a), _bits(b)) for a, b in zip(ours, again, strict=True))
        return got

    return run


class _Shadowed(DeviceDeepseekModel):
    """Computes with ops that are told to it."""

    told: Ops

    def ops(self, page_tokens: int) -> Ops:  # noqa: ARG002 - the model's own
        """Return them."""
        return self.told


def shadow(device: torch.device = GPU, raw: Callable[[], dict[str, Any]] = mini_config) -> dict[str, object]:
    """Run steps of every kind, each op beside its reference."""
    config = parse_config(raw())
    model = _Shadowed(config, RandomParts(config, device).model(), facts_of(config))
    driver = RowsDriver(model, 64, 1536, random_kv=True)
    plain = ops_of(config, PAGE, device)
    found: dict[str, object] = {}
    for (step, (rows, start, lengths)), fixed in itertools.product(STEPS.items(), (False, True)):
        seen: Seen = {}
        wrapped = {
            field.name: shadowed(field.name, getattr(plain, field.name), seen)
            for field in dataclasses.fields(Ops) if field.name != "captured"
        }  # fmt: skip
        model.told = dataclasses.replace(plain, **wrapped)
        tokens = [text(i, length, config.vocab_size) for i, length in enumerate(lengths)]
        driver.run(driver.batch(rows, start, tokens, [[-1, -1, -1]] * len(rows), fixed=fixed))
        step = f"{step}, deterministic" if fixed else step
        found[step] = dict(sorted(seen.items(), key=lambda item: -item[1]["worst"]))
        for name, row in seen.items():
            print(
                f"{step}: {name} {row['calls']:.0f} calls, at worst {row['worst']:.3g}, {row['not_the_same_again']:.0f} not the same again",
                flush=True,
            )
    return found
