"""Vendors' kernels: adapters equal the references, and a row is used only where it can, may and is known to pay."""

import logging
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.kernel_cases import CASES
from benchmarks.kernel_checks import check
from core.errors import ConfigError
from engine.config import KernelsConfig
from engine.kernels.ops import PROVIDERS, REFERENCE, pick, provider_of
from engine.kernels.vendors.table import VENDORS, Vendor, providers_for
from tests.fakes.vendor_kernels import modules

CPU = torch.device("cpu")
BY_NAME = {vendor.name: vendor for vendor in VENDORS}
SIZES = [
    (vendor.name, case, size) for vendor in VENDORS for case in CASES if case.op in vendor.ops for size in case.small
]


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vendors' packages, as if installed."""
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, f"engine.kernels.vendors.{name}", raising=False)


def here(name: str, **changes: object) -> Vendor:
    """A vendor's row as it would be on a machine that has the package: this project stands for it, a CPU for a GPU."""
    found = {"needs": "torch", "wheels": {"torch": "1.0"}, "devices": frozenset({"cpu"}), "majors": frozenset({0})}
    return replace(BY_NAME[name], **{**found, **changes})


def test_every_vendor_of_the_issue_has_a_row_and_none_is_used_without_a_record():
    assert set(BY_NAME) == {"deep_gemm", "flash_mla", "deep_select", "deep_ep", "tile_kernels"}
    assert {case.op for _, case, _ in SIZES} == {op for vendor in VENDORS for op in vendor.ops}
    assert providers_for(KernelsConfig(), CPU, deterministic=False) == PROVIDERS


@pytest.mark.parametrize(("name", "case", "size"), SIZES, ids=[f"{n}-{c.op}-{s}" for n, c, s in SIZES])
@pytest.mark.usefixtures("packages")
def test_an_adapter_over_the_documented_interface_equals_the_reference(name, case, size):
    assert check(case, size, "cpu", provider=here(name, forced=True)) is None


@pytest.mark.usefixtures("packages")
def test_a_forced_row_comes_first_for_its_ops_and_says_so_aloud(caplog):
    rows = (here("deep_select"),)
    config = KernelsConfig(force=("deep_select",))
    providers = providers_for(config, CPU, deterministic=True, vendors=rows)
    assert provider_of("select_top", CPU, providers).name == "deep_select"
    assert provider_of("sort_routes", CPU, providers) is REFERENCE
    with caplog.at_level(logging.WARNING):
        chosen = pick("select_top", CPU, providers)(torch.tensor([[1.0, 3.0, 3.0]]), torch.tensor([3]), 1, 1)
    assert chosen.tolist() == [[1]]
    assert "op select_top is computed by deep_select" in caplog.text
    assert "forced" in caplog.text


def test_a_recorded_row_is_used_unasked_unless_it_is_forbidden():
    rows = (here("deep_select", recorded={"select_top": "benchmarks/results/some.json"}),)
    asked = providers_for(KernelsConfig(), CPU, deterministic=True, vendors=rows)
    assert provider_of("select_top", CPU, asked).name == "deep_select"
    refused = providers_for(KernelsConfig(forbid=("deep_select",)), CPU, deterministic=True, vendors=rows)
    assert refused == PROVIDERS


def test_a_recorded_row_whose_bits_depend_on_the_batch_is_not_used_by_a_deterministic_engine():
    rows = (here("deep_gemm", recorded={"plain_linear": "benchmarks/results/some.json"}),)
    assert providers_for(KernelsConfig(), CPU, deterministic=True, vendors=rows) == PROVIDERS
    assert providers_for(KernelsConfig(), CPU, deterministic=False, vendors=rows)[0] is rows[0]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (here("deep_gemm", wheels={"no-such-distribution": "1.0"}), "no-such-distribution is not installed"),
        (here("deep_gemm", needs="no_such_module"), "torch is not installed"),
        (here("deep_gemm", wheels={"torch": "1000.0"}), "the first that fits is 1000.0"),
        (here("deep_gemm", majors=frozenset({9})), r"compute capability 0, it runs on \[9\]"),
        (here("deep_ep"), "it has no op yet"),
    ],
)
def test_forcing_what_cannot_run_is_an_error_that_says_why(row, why):
    with pytest.raises(ConfigError, match=why):
        providers_for(KernelsConfig(force=(row.name,)), CPU, deterministic=False, vendors=(row,))


def test_forcing_what_is_not_deterministic_or_not_known_is_an_error():
    with pytest.raises(ConfigError, match="engine.deterministic is on"):
        providers_for(KernelsConfig(force=("deep_gemm",)), CPU, deterministic=True, vendors=(here("deep_gemm"),))
    with pytest.raises(ConfigError, match="known are deep_ep, deep_gemm"):
        providers_for(KernelsConfig(forbid=("deepgemm",)), CPU, deterministic=True)
