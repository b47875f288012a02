"""The table of ops picks a provider by device and by what is installed."""

import importlib.util
from pathlib import Path

import pytest
import torch

from engine.kernels.ops import PROVIDERS, REFERENCE, TRITON, Provider, pick, provider_of

CPU, GPU = torch.device("cpu"), torch.device("cuda")
OPS = sorted(
    path.stem for path in Path(importlib.util.find_spec("engine.kernels.reference").origin).parent.glob("*.py")
)
OPS = [op for op in OPS if op not in ("__init__", "formats")]


def test_a_cpu_gets_the_reference():
    assert all(provider_of(op, CPU) is REFERENCE for op in OPS)
    assert len(OPS) >= 11


@pytest.mark.parametrize("op", OPS)
def test_every_reference_has_a_triton_kernel_of_the_same_name(op):
    assert importlib.util.find_spec(f"{TRITON.module}.{op}") is not None


def test_a_gpu_gets_triton_where_it_is_installed_and_the_reference_where_not():
    without = Provider("triton", TRITON.module, "a_distribution_that_does_not_exist", TRITON.devices)
    assert provider_of("select_top", GPU, (without, REFERENCE)) is REFERENCE
    found = Provider("triton", TRITON.module, "torch", TRITON.devices)
    assert provider_of("select_top", GPU, (found, REFERENCE)) is found


def test_an_installed_vendor_comes_first_for_the_ops_it_has_and_for_no_others():
    """The fake vendor is the package of references under another name: it has `select_top` and lacks `formats_of`."""
    fake = Provider("vendor", REFERENCE.module, "torch", frozenset({"cuda"}))
    assert provider_of("select_top", GPU, (fake, *PROVIDERS)) is fake
    only_other = Provider("vendor", "tests.fakes", "torch", frozenset({"cuda"}))
    assert provider_of("select_top", GPU, (only_other, REFERENCE)) is REFERENCE


def test_pick_loads_the_function():
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    chosen = pick("select_top", CPU)(scores, torch.tensor([4], dtype=torch.int32), 2, 1)
    assert chosen.tolist() == [[1, 2]]
