"""Which ops serve a model on a device: the tiny one has shapes below some kernels' minima and is captured all the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.kernel_cases import CASES
from engine.kernels.ops import REFERENCE, Provider
from engine.models.deepseek_v41.device.ops import ops_of
from engine.models.deepseek_v41.parse import parse_config
from engine.models.deepseek_v41.presets import mini_config, tiny_config

ROOT = Path(__file__).resolve().parents[6]
CPU = torch.device("cpu")
KERNELS = Provider("triton", "engine.kernels", "torch", frozenset({"cpu"}))
"""Triton's, as if a CPU were a GPU."""
NARROW = {"index_scores", "block_scores", "sparse_attention"}


def references(ops) -> set[str]:
    named = {name: getattr(ops, name) for name in ops.__dataclass_fields__ if name != "captured"}
    return {name for name, op in named.items() if op.__module__.startswith(REFERENCE.module)}


def test_every_op_of_the_mini_model_and_all_but_three_of_the_tiny_one_are_kernels_and_both_can_be_captured():
    mini = ops_of(parse_config(mini_config()), 256, CPU, (KERNELS, REFERENCE))
    tiny = ops_of(parse_config(tiny_config()), 16, CPU, (KERNELS, REFERENCE))
    assert references(mini) == set()
    assert references(tiny) == NARROW
    assert mini.captured
    assert tiny.captured
    assert not ops_of(parse_config(tiny_config()), 16, CPU, (REFERENCE,)).captured


@pytest.mark.parametrize("op", sorted(NARROW))
def test_the_references_that_the_tiny_model_uses_on_a_device_neither_wait_for_it_nor_upload(op, monkeypatch):
    """Tensors without values: whatever asks for one, or for a shape that depends on one, raises."""
    case = next(case for case in CASES if case.op == op)
    calls = [case.make(torch.Generator().manual_seed(0), size) for size in case.small]
    for made in ("tensor", "as_tensor", "from_numpy"):
        monkeypatch.delattr(torch, made)

    def empty(value):
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    for call in calls:
        REFERENCE.load(op)(*map(empty, call.args), **{name: empty(value) for name, value in call.keywords.items()})


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_decode_step_of_the_tiny_model_through_kernels_is_that_of_the_references():
    """In a process of its own: the interpreter is chosen when kernels are defined."""
    code = """
import torch
from benchmarks import kernel_interpreter
from engine.kernels.ops import REFERENCE, Provider
from engine.models.deepseek_v41.device.ops import ops_of
from tests.fakes.deepseek_driver import PAGE, Driver, text
from tests.fakes.device_deepseek import device_model
kernel_interpreter.install()
plain, kernels = Driver(device_model()), Driver(device_model())
for driver in (plain, kernels):
    driver.step({0: text(0, 21)})
model = kernels.model
triton = Provider("triton", "engine.kernels", "torch", frozenset({"cpu"}))
model._ops[PAGE] = ops_of(model.config, PAGE, model.device, (triton, REFERENCE))
want, got = plain.step({0: [5]})[0], kernels.step({0: [5]})[0]
assert bool(got.isfinite().all())
torch.testing.assert_close(got, want, atol=0.3, rtol=0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=580, check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
