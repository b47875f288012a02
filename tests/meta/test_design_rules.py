"""Rules of the design that a reader must be able to rely on, each with a planted violation that the check finds."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("core", "engine", "kv_transfer", "prefill_worker", "decode_worker", "gateway")
MODEL_NAMES = ("llama", "smollm", "deepseek", "qwen", "mistral", "scripted", "gguf")
NAMELESS = (
    "engine/scheduler",
    "engine/cache",
    "engine/runner",
    "engine/attention",
    "engine/layers",
    "kv_transfer",
    "core",
)


def trees(*packages: str) -> dict[str, ast.Module]:
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text())
        for package in packages
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def calls(node: ast.AST, method: str) -> bool:
    return any(
        isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == method for n in ast.walk(node)
    )


def step_loops(modules: dict[str, ast.Module]) -> list[str]:
    """Modules whose functions launch steps: directly in a while loop, or in a class that has one which steps."""
    return [
        name
        for name, tree in modules.items()
        if calls(tree, "launch") and calls(tree, "collect") and any(isinstance(n, ast.While) for n in ast.walk(tree))
    ]


def test_there_is_exactly_one_step_loop():
    assert step_loops(trees(*PACKAGES)) == ["engine/loop.py"]


def test_a_second_step_loop_would_be_found():
    planted = ast.parse("while True:\n    h = runner.launch(p)\n    runner.collect(h)\n")
    assert step_loops({"planted.py": planted}) == ["planted.py"]


def enclosing(tree: ast.Module, method: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [f for f in functions if calls(f, method)]


def unproven_releases(modules: dict[str, ast.Module]) -> list[str]:
    """Functions of the transfer layer that hand pages back with `prove` without having asked `quiesced`."""
    return [
        f"{name}:{function.name}"
        for name, tree in modules.items()
        for function in enclosing(tree, "prove")
        if not calls(function, "quiesced")
    ]


def test_only_quiesced_leads_to_free():
    assert unproven_releases(trees("kv_transfer")) == []
    assert any(enclosing(tree, "prove") for tree in trees("kv_transfer").values()), "nobody proves pages: a leak"


def test_a_release_without_proof_would_be_found():
    planted = ast.parse("def on_timeout(self):\n    self.host.prove(self.pages)\n")
    assert unproven_releases({"planted.py": planted}) == ["planted.py:on_timeout"]


def test_prove_is_passed_on_by_the_worker_and_engine_only():
    callers = {
        name
        for name, tree in trees("engine", "decode_worker", "prefill_worker", "gateway").items()
        if calls(tree, "prove")
    }
    assert {name.split("/")[0] for name in callers} <= {"engine", "decode_worker"}
    assert len([name for name in callers if name.startswith("decode_worker")]) == 1


def model_names(source: str) -> list[str]:
    return [word for word in MODEL_NAMES if word in source.lower()]


def test_no_model_is_named_outside_the_models():
    found = {
        str(path.relative_to(ROOT)): names
        for folder in NAMELESS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (names := model_names(path.read_text()))
    }
    assert found == {}


def test_a_planted_model_name_would_be_found():
    assert model_names("if config.model == 'Llama': pass") == ["llama"]


def role_branches(tree: ast.Module) -> list[int]:
    """`if role == ...` and friends: role is a process, never a flag."""
    return [
        n.lineno
        for n in ast.walk(tree)
        if isinstance(n, ast.If | ast.IfExp)
        and any(isinstance(c, ast.Compare) and "role" in ast.unparse(c.left) for c in ast.walk(n.test))
    ]


def test_no_worker_or_engine_code_branches_on_a_role():
    found = {
        name: lines
        for name, tree in trees("engine", "kv_transfer", "prefill_worker", "decode_worker").items()
        if (lines := role_branches(tree))
    }
    assert found == {}


def test_a_planted_role_branch_would_be_found():
    assert role_branches(ast.parse("if self.role == 'prefill':\n    pass\n")) == [1]
