"""Import rules of style section 6.2, and that each root package is ours."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOTS = ("core", "engine", "kv_transfer", "prefill_worker", "decode_worker", "gateway", "deploy", "benchmarks")
LAZY_IMPORTS_ALLOWED = {"factory.py", "registry.py"}


def test_import_contracts_hold():
    run = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("name", ROOTS)
def test_root_package_resolves_to_this_repository(name):
    module = importlib.import_module(name)
    assert Path(module.__file__).is_relative_to(ROOT)


def test_proto_is_a_source_root_and_never_a_package():
    assert not (ROOT / "proto" / "__init__.py").exists()


def lazy_imports(source: str) -> list[int]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found += [n.lineno for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom)]
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            found.append(node.lineno)
    return found


def test_imports_are_at_the_top_except_in_factories():
    bad = []
    for package in ROOTS:
        for path in (ROOT / package).rglob("*.py"):
            if path.name not in LAZY_IMPORTS_ALLOWED:
                bad += [f"{path.relative_to(ROOT)}:{line}" for line in lazy_imports(path.read_text())]
    assert bad == []


def test_the_lazy_import_check_finds_a_planted_one():
    assert lazy_imports("def f():\n    import torch\n") == [2]


def test_only_the_config_module_reads_the_environment():
    bad = [
        str(path.relative_to(ROOT))
        for package in ROOTS
        for path in (ROOT / package).rglob("*.py")
        if path != ROOT / "core" / "config.py" and any(w in path.read_text() for w in ("os.environ", "os.getenv"))
    ]
    assert bad == []


def test_only_core_rpc_imports_the_stubs():
    bad = [
        str(path.relative_to(ROOT))
        for package in ROOTS
        for path in (ROOT / package).rglob("*.py")
        if not path.is_relative_to(ROOT / "core" / "rpc")
        and ("from tandem.v1" in path.read_text() or "import tandem" in path.read_text())
    ]
    assert bad == []
