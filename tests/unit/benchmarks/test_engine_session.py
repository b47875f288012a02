"""The list for the next GPU names what exists, and keeps to the time that the machine is lent for."""

import importlib
import json
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

pytest.importorskip("triton")

from benchmarks import handover_gpu, v41_gpu
from benchmarks.engine_session import STEPS, Step, ran, seconds_for
from benchmarks.kernel_cases import CASES
from benchmarks.kernel_trials import case_of
from engine.kernels.vendors.table import VENDORS

ROOT = Path(__file__).resolve().parents[3]
NAMES = {
    "v41_gpu": set(v41_gpu.PARTS),
    "kernels_gpu": {case.op for case in CASES} | {vendor.name for vendor in VENDORS},
    "kernel_trials": {"140", "deep_gemm", "benchmarks/trials_v41.json"},
    "handover_gpu": {*handover_gpu.PARTS, "tiny-llama", "v41-tiny", "v41-mini", "2"},
}


@pytest.mark.parametrize("step", STEPS, ids=[step.name for step in STEPS])
def test_a_step_names_parts_and_ops_that_exist(step):
    assert {word for word in step.arguments if not word.startswith("--")} <= NAMES[step.module]
    assert step.record.endswith(".json")


def test_trials_name_sizes_and_fields_that_exist():
    trials = json.loads((ROOT / "benchmarks" / "trials_v41.json").read_text())
    assert trials
    for trial in trials:
        shape = get_type_hints(importlib.import_module(f"engine.kernels.{trial['op']}").shape_of)["return"]
        assert set(trial["set"]) <= set(shape._fields), trial
        assert case_of(trial).op == trial["op"]
        assert all(isinstance(value, int) for value in trial["size"].values())


def test_a_step_gets_its_limit_or_what_is_left_and_is_left_out_below_half():
    step = Step("one", 100, "v41_gpu", (), "v41_h200.json")
    assert [seconds_for(step, left) for left in (500, 100, 60, 50, 49)] == [100, 100, 60, 50, 0]


def test_a_command_that_takes_too_long_is_ended_and_said_to_be():
    assert ran([sys.executable, "-c", "raise SystemExit(3)"], 60) == 3
    assert ran([sys.executable, "-c", "import time; time.sleep(60)"], 0.2) == 124
