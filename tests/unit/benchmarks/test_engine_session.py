"""The list for a GPU names what exists, and keeps to the time that the machine is lent for."""

import argparse
import sys
import time

import pytest

pytest.importorskip("triton")

from benchmarks import engine_session, kernels_k, v41_slices
from benchmarks.engine_session import STEPS, Step, do_ahead, ran, run_steps, seconds_for
from benchmarks.kernel_cases import CASES
from engine.kernels.vendors.table import VENDORS

NAMES = {
    "kernels_gpu": {case.op for case in CASES} | {vendor.name for vendor in VENDORS},
    "kernels_k": set(kernels_k.SETS),
    "v41_slices": set(v41_slices.RANKS),
}


@pytest.mark.parametrize("step", STEPS, ids=[step.name for step in STEPS])
def test_a_step_names_parts_and_ops_that_exist(step):
    words = {word for word in step.arguments if not word.startswith("--") and not word.isdigit()}
    assert words <= NAMES[step.module]
    assert step.record.endswith(".json")


def test_a_step_gets_its_limit_or_what_is_left_and_is_left_out_below_half():
    step = Step("one", 100, "v41_gpu", (), "v41_h200.json")
    assert [seconds_for(step, left) for left in (500, 100, 60, 50, 49)] == [100, 100, 60, 50, 0]


def test_a_command_that_takes_too_long_is_ended_and_said_to_be():
    assert ran([sys.executable, "-c", "raise SystemExit(3)"], 60) == 3
    assert ran([sys.executable, "-c", "import time; time.sleep(60)"], 0.2) == 124


def test_gpus_take_steps_from_one_list(monkeypatch, tmp_path):
    used = []
    monkeypatch.setattr(engine_session, "ran", lambda command, limit, gpu: used.append((command[-1], gpu)) or 0)
    steps = [Step(name, 10, "v41_gpu", (name,), "v41_h200.json") for name in ("S2", "S3")]
    options = argparse.Namespace(out=tmp_path, commit="", seconds=100.0)
    assert run_steps(steps, options, time.monotonic(), 1) == 0
    assert used == [("S2", 1), ("S3", 1)]
    assert not steps


def test_all_steps_compile_and_check_first(monkeypatch, tmp_path):
    used = []
    monkeypatch.setattr(engine_session, "ran", lambda command, limit, gpu: used.append((command, limit, gpu)))
    steps = [step for step in STEPS if step.name in ("S2", "experts", "attention")]
    do_ahead(steps, argparse.Namespace(out=tmp_path, commit="", gpus=2))
    assert sorted(gpu for _, _, gpu in used) == [0, 0, 1]
    assert sorted(("--compile" in command, "--checks" in command) for command, _, _ in used) == [
        (False, True), (False, True), (True, False)
    ]  # fmt: skip
    assert all((tmp_path / step.name).is_dir() for step in steps)
