"""Writes the catalogues in `docs/` from the code: every setting, every metric, every error.

``python -m deploy.catalogue`` rewrites them; a test compares them with what the code says now. Pure rendering.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
from prometheus_client import CollectorRegistry

from core.errors import BY_CODE
from core.exported import ExportedStatistics
from core.metrics import Metrics
from decode_worker.config import DecodeWorkerConfig
from decode_worker.metrics import DECODE_METRICS, stage_times
from deploy.controller.config import ControllerConfig
from deploy.controller.metrics import ScalerMetrics
from deploy.local.spec import ClusterSpec
from gateway.config import GatewayConfig
from gateway.http.metrics import HttpMetrics
from gateway.metrics import GatewayMetrics
from prefill_worker.config import PrefillWorkerConfig
from prefill_worker.metrics import PREFILL_METRICS

DOCS = Path(__file__).parents[1] / "docs"
PROCESSES = (
    ("prefill worker (`python -m prefill_worker`)", PrefillWorkerConfig),
    ("decode worker (`python -m decode_worker`)", DecodeWorkerConfig),
    ("gateway (`python -m gateway`)", GatewayConfig),
    ("controller (`python -m deploy.controller`)", ControllerConfig),
    ("local cluster (`tandem up -f FILE`)", ClusterSpec),
)
PACKAGES = ("core", "engine", "kv_transfer", "prefill_worker", "decode_worker", "gateway", "deploy", "benchmarks")
HEAD = "<!-- Written by `python -m deploy.catalogue`; edit the code instead. -->\n\n"


def comments(kind: type) -> dict[str, str]:
    """Return the docstring that follows each attribute of a class, first paragraph in one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        is_text = (
            isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
        )
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            assert isinstance(text, ast.Expr)
            assert isinstance(text.value, ast.Constant)
            found[field.target.id] = " ".join(str(text.value.value).split())
    return found


def cell(text: str) -> str:
    """Return text that does not break a table."""
    return text.replace("|", "\\|")


def struct_of(kind: Any) -> type[msgspec.Struct] | None:
    """Return the struct behind a field's type, if it is a section of its own."""
    for candidate in (kind, *get_args(kind)):
        if isinstance(candidate, type) and issubclass(candidate, msgspec.Struct):
            return candidate
    return None


def settings(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (dotted key, default, meaning) of every setting, in order of declaration."""
    texts = comments(kind)
    for field in msgspec.structs.fields(kind):
        section = struct_of(field.type)
        if section is not None:
            yield from settings(section, f"{prefix}{field.name}.")
            continue
        if field.default is not msgspec.NODEFAULT:
            default = msgspec.json.encode(field.default).decode()
        elif field.default_factory is not msgspec.NODEFAULT:
            default = msgspec.json.encode(field.default_factory()).decode()
        else:
            default = "required"
        yield f"{prefix}{field.name}", default, texts.get(field.name, "")


def render_config() -> str:
    """Return docs/config.md."""
    parts = [
        HEAD,
        "# Settings\n\nEvery process reads one TOML file (`--config FILE`) and overrides (`--set section.key=value`).\n",
    ]
    parts.append("A key that does not exist is an error that names it. Units are in the names.\n")
    for title, kind in PROCESSES:
        parts.append(f"\n## {title}\n\n| setting | default | meaning |\n|---|---|---|\n")
        parts += [f"| `{key}` | `{default}` | {cell(meaning)} |\n" for key, default, meaning in settings(kind)]
    return "".join(parts)


def catalogues() -> Iterator[tuple[str, Metrics]]:
    """Yield the metrics of each kind of process, declared as the process declares them."""
    for title, table in (("prefill worker", PREFILL_METRICS), ("decode worker", DECODE_METRICS)):
        metrics = Metrics()
        ExportedStatistics(metrics, table)
        if table is DECODE_METRICS:
            stage_times(metrics)
        yield title, metrics
    metrics = Metrics()
    GatewayMetrics(metrics)
    yield "gateway", metrics
    yield "gateway, HTTP", HttpMetrics(CollectorRegistry()).metrics
    metrics = Metrics()
    ScalerMetrics(metrics)
    yield "controller", metrics


def render_metrics() -> str:
    """Return docs/metrics.md."""
    parts = [
        HEAD,
        "# Metrics\n\nPrometheus text at `/metrics` of each process's health listener (and of the gateway's HTTP port).\n",
    ]
    for title, metrics in catalogues():
        parts.append(f"\n## {title}\n\n| metric | kind | labels | meaning |\n|---|---|---|---|\n")
        parts += [f"| `{m.name}` | {m.kind} | {', '.join(m.labels)} | {m.help} |\n" for m in metrics.catalogue()]
    return "".join(parts)


def render_errors() -> str:
    """Return docs/errors.md."""
    parts = [HEAD, "# Errors\n\nOne tree (`core/errors.py`), mapped once. `code` is stable and what clients see.\n\n"]
    parts.append("| code | class | HTTP | gRPC | another worker may be asked | meaning |\n|---|---|---|---|---|---|\n")
    for code, kind in BY_CODE.items():
        meaning = " ".join((kind.__doc__ or "").split())
        retry = "yes" if kind.retryable else "no"
        parts.append(
            f"| `{code}` | `{kind.__name__}` | {kind.http_status} | {kind.grpc_status} | {retry} | {meaning} |\n"
        )
    return "".join(parts)


def render_modules() -> str:
    """Return docs/modules.md: one line per module, its own first sentence."""
    parts = [HEAD, "# Modules\n\nEvery module is one noun; the line is the first paragraph of its docstring.\n"]
    for package in PACKAGES:
        parts.append(f"\n## {package}/\n\n| module | what it is |\n|---|---|\n")
        for path in sorted((DOCS.parent / package).rglob("*.py")):
            text = ast.get_docstring(ast.parse(path.read_text()))
            if text:
                first = " ".join(text.split("\n\n")[0].split())
                parts.append(f"| `{path.relative_to(DOCS.parent)}` | {cell(first)} |\n")
    return "".join(parts)


PAGES = {
    "modules.md": render_modules,
    "config.md": render_config,
    "metrics.md": render_metrics,
    "errors.md": render_errors,
}


def main() -> None:
    """Rewrite all catalogues."""
    for name, render in PAGES.items():
        (DOCS / name).write_text(render())


if __name__ == "__main__":
    main()
