"""Size limits of style rule 1: a module 400 lines, a function 60, a class 250; and a total budget."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("core", "engine", "kv_transfer", "prefill_worker", "decode_worker", "gateway", "deploy", "benchmarks")
TOTAL_BUDGET = 78_300
"""Lines of product code; raised only in a commit of its own."""


def modules():
    return [p for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py"))]


def too_large(source: str, name: str) -> list[str]:
    found = []
    if (lines := source.count("\n")) > 400:
        found.append(f"{name}: {lines} lines")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            limit = 250 if isinstance(node, ast.ClassDef) else 60
            length = node.end_lineno - node.lineno + 1
            if length > limit:
                found.append(f"{name}:{node.lineno} {node.name}: {length} lines")
    return found


def test_no_module_function_or_class_is_too_large():
    assert [f for p in modules() for f in too_large(p.read_text(), str(p.relative_to(ROOT)))] == []


def test_the_check_finds_a_planted_long_function():
    source = "def f():\n" + "    x = 1\n" * 61
    assert too_large(source, "planted") == ["planted:1 f: 62 lines"]


def test_the_whole_stays_within_its_line_budget():
    assert sum(p.read_text().count("\n") for p in modules()) <= TOTAL_BUDGET
