"""Kernels that may begin while the one before them ends wait for it before they touch what it may still write or read."""

import ast
from pathlib import Path

import pytest

pytest.importorskip("triton")
from benchmarks.kernel_cases import CASES  # noqa: E402 - it imports Triton
from benchmarks.kernel_compile import CHIPS, launches  # noqa: E402

KERNELS = Path(__file__).resolve().parents[4] / "engine/kernels"
WEIGHTS = {"W", "SCALE", "BASE", "FREQUENCIES", "NORM", "KEY_NORM"}
"""Parameters that nothing on a device writes: what may be read before."""


def functions(source: str) -> list[ast.FunctionDef]:
    """Bodies that are launched so: those with a parameter PDL that stores."""
    return [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
        and any(arg.arg == "PDL" for arg in node.args.args)
        and node.name != "after_kernels_before"
    ]


def is_wait(statement: ast.stmt) -> bool:
    return ast.unparse(statement) == "after_kernels_before(PDL)"


def faults(function: ast.FunctionDef) -> list[str]:
    """What is touched before the wait, or that there is none."""
    waits = [i for i, statement in enumerate(function.body) if is_wait(statement)]
    if len(waits) != 1:
        return [f"{function.name} waits {len(waits)} times"]
    before = [call for s in function.body[: waits[0]] for call in ast.walk(s) if isinstance(call, ast.Call)]
    touched = [
        ast.unparse(call.args[0]) for call in before if ast.unparse(call.func).startswith(("tl.load", "tl.store"))
    ]
    names = {word.id for place in touched for word in ast.walk(ast.parse(place)) if isinstance(word, ast.Name)}
    names -= {arg.arg for arg in function.args.args if arg.annotation is not None}
    return [
        f"{function.name} touches {name} before it waits" for name in names if name.isupper() and name not in WEIGHTS
    ]


def launched_so() -> dict[str, list[ast.FunctionDef]]:
    found = {path.stem: functions(path.read_text()) for path in sorted(KERNELS.glob("*.py"))}
    return {name: bodies for name, bodies in found.items() if bodies}


@pytest.mark.parametrize("name", launched_so())
def test_a_kernel_waits_before_it_touches_anything_but_weights(name):
    assert [fault for body in launched_so()[name] for fault in faults(body)] == []


def test_a_kernel_that_does_not_wait_or_waits_too_late_is_found():
    none = "def f(X, PDL):\n    tl.store(X, 0)\n"
    late = "def f(X, W, PDL):\n    w = tl.load(W + 1)\n    x = tl.load(X + 1)\n    after_kernels_before(PDL)\n"
    assert [faults(one) for source in (none, late) for one in functions(source)] == [
        ["f waits 0 times"],
        ["f touches X before it waits"],
    ]


@pytest.mark.parametrize("case", CASES, ids=[f"{case.op}-{len(case.checks)}" for case in CASES])
def test_launches_are_told_what_bodies_are(case):
    """A launch that may begin early without a body that waits would be a race."""
    for launch in launches(case, case.small[0], CHIPS["sm_90"]):
        assert launch.constants.get("PDL", False) == launch.options.get("launch_pdl", False), launch.function
    for launch in launches(case, case.small[0], CHIPS["gfx950"]):
        assert not launch.options.get("launch_pdl", False), launch.function
