"""The Grafana dashboard as code: ``python -m deploy.monitoring.dashboard`` rewrites `dashboard.json` beside it.

Plain dashboard JSON (schema version 39): panels of the time-series kind, two a row, one question each.
"""

import json
from dataclasses import dataclass
from pathlib import Path

PATH = Path(__file__).with_name("dashboard.json")
WIDTH, HEIGHT = 12, 8
SCHEMA_VERSION = 39


@dataclass(frozen=True, slots=True)
class Panel:
    """One question: its title, Grafana's unit, and (legend, PromQL) pairs."""

    title: str
    unit: str
    series: tuple[tuple[str, str], ...]


def _quantiles(metric: str, by: str = "") -> tuple[tuple[str, str], ...]:
    groups = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    return tuple(
        (f"p{int(q * 100)}{legend}", f"histogram_quantile({q}, sum by ({groups}) (rate({metric}_bucket[1m])))")
        for q in (0.5, 0.95, 0.99)
    )


PANELS = (
    Panel(
        "Requests per second by outcome",
        "reqps",
        (("{{outcome}}", "sum by (outcome) (rate(tandem_gateway_samples_total[1m]))"),),
    ),
    Panel("Time to first token", "s", _quantiles("tandem_http_time_to_first_token_seconds")),
    Panel(
        "Tokens per second",
        "short",
        (
            (
                "prompt, uncached",
                "sum(rate(tandem_gateway_prompt_tokens_total[1m])) - sum(rate(tandem_gateway_cached_tokens_total[1m]))",
            ),
            ("prompt, cached", "sum(rate(tandem_gateway_cached_tokens_total[1m]))"),
            ("output", "sum(rate(tandem_gateway_output_tokens_total[1m]))"),
        ),
    ),
    Panel(
        "Workers ready",
        "short",
        (
            ("{{role}}", "max by (role) (tandem_gateway_workers_ready)"),
            ("desired {{role}}", "tandem_scaler_desired_workers"),
        ),
    ),
    Panel(
        "Where requests spend their time",
        "s",
        (("{{cause}}", "sum by (cause) (rate(tandem_gateway_time_seconds_total[1m]))"),),
    ),
    Panel(
        "In flight and queued",
        "short",
        (
            ("in flight", "sum(tandem_gateway_samples_in_flight)"),
            ("queued", "sum(tandem_gateway_samples_queued)"),
        ),
    ),
    Panel(
        "Prefix cache: share of prompt tokens found",
        "percentunit",
        (("cached", "tandem:prompt_cached:ratio"),),
    ),
    Panel(
        "KV pages by state",
        "short",
        tuple(
            (f"{state} {{{{instance}}}}", f"tandem_pages_{state}")
            for state in ("free", "tree", "private", "landing", "unproven")
        ),
    ),
    Panel("KV moved", "Bps", (("{{transport}}", "tandem:pulled_bytes:rate"),)),
    Panel("Stages of a hand-over", "s", _quantiles("tandem_transfer_stage_seconds", "stage")),
    Panel(
        "What should stay at zero",
        "short",
        (
            ("lease expiries", "sum(increase(tandem_transfer_lease_expiries_total[5m]))"),
            ("failed hand-overs", "sum(increase(tandem_transfer_pulls_failed_total[5m]))"),
            ("digest failures", "sum(increase(tandem_transfer_digest_failures_total[5m]))"),
            ("retractions", "sum(increase(tandem_retractions_total[5m]))"),
            ("engine restarts", "sum(increase(tandem_transfer_engine_restarts_total[5m]))"),
        ),
    ),
    Panel(
        "Retries by cause",
        "short",
        (("{{cause}}", "sum by (cause) (rate(tandem_gateway_retries_total[1m]))"),),
    ),
    Panel(
        "Need of the pools (workers)",
        "short",
        (("{{role}} {{term}}", "tandem_scaler_need_workers"),),
    ),
    Panel(
        "Speculation: share of drafts accepted",
        "percentunit",
        (("accepted", "sum(rate(tandem_drafts_accepted_total[1m])) / sum(rate(tandem_drafts_verified_total[1m]))"),),
    ),
)


def dashboard() -> dict[str, object]:
    """Return the whole dashboard as plain data."""
    return {
        "title": "Tandem",
        "uid": "tandem",
        "schemaVersion": SCHEMA_VERSION,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [{"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}]
        },
        "panels": [_panel(number, panel) for number, panel in enumerate(PANELS)],
    }


def _panel(number: int, panel: Panel) -> dict[str, object]:
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": source,
        "gridPos": {"x": (number % 2) * WIDTH, "y": (number // 2) * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "expr": expression, "legendFormat": legend, "datasource": source}
            for place, (legend, expression) in enumerate(panel.series)
        ],
    }


def main() -> None:
    """Rewrite the JSON file."""
    PATH.write_text(json.dumps(dashboard(), indent=1) + "\n")


if __name__ == "__main__":
    main()
