"""A real Prometheus on a real local cluster: are all targets, rules and panels there, and does an alert fire?

Needs the program `prometheus` (Debian's package). The fault: the only decode worker is stopped for half a minute.

    python -m benchmarks.prometheus_live
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from benchmarks.record import write_record
from deploy.local.control import ask

ROOT = Path(__file__).resolve().parents[1]
RULES = ROOT / "deploy" / "monitoring" / "rules.yml"
DASHBOARD = ROOT / "deploy" / "monitoring" / "dashboard.json"
ALERT = "TandemNoDecodeWorker"
PATIENCE_S = 180.0


def until(look: Callable[[], object], what: str) -> float:
    """Wait until `look` is true; return how long it took."""
    begun = time.monotonic()
    while not look():
        if time.monotonic() - begun > PATIENCE_S:
            raise TimeoutError(what)
        time.sleep(0.5)
    return round(time.monotonic() - begun, 1)


def targets(run_dir: Path) -> dict[str, str]:
    """Return the metrics address of each process by id."""
    told = ask(run_dir, {"command": "status"}, lambda _: None, 30.0)
    return {p["id"]: p.get("listener_address") or p["http_address"] for p in told["processes"]}


def configuration(addresses: dict[str, str]) -> str:
    """Return a prometheus.yml, which is JSON."""
    static = [{"targets": [address], "labels": {"instance": name}} for name, address in addresses.items()]
    body = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "tandem", "static_configs": static}],
    }
    return json.dumps(body)


def expressions() -> list[str]:
    """Return every expression of the dashboard, with Grafana's interval replaced."""
    found = []

    def walk(node: object) -> None:
        if isinstance(node, dict):
            found.extend([node["expr"]] if isinstance(node.get("expr"), str) else [])
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(json.loads(DASHBOARD.read_text()))
    return [text.replace("$__rate_interval", "1m") for text in found]


def watch(base: str, addresses: dict[str, str], pid: int, gateway: str) -> dict[str, object]:
    """Look at a Prometheus that scrapes the cluster, then stop the decode worker and wait for the alert."""

    def get(path: str, **query: str) -> dict[str, object]:
        return httpx.get(base + path, params=query, timeout=30).json()

    def up() -> int:
        return sum(t["health"] == "up" for t in get("/api/v1/targets")["data"]["activeTargets"])

    def firing() -> set[str]:
        return {a["labels"]["alertname"] for a in get("/api/v1/alerts")["data"]["alerts"] if a["state"] == "firing"}

    until(lambda: up() == len(addresses), "not all targets are up")
    body = {"model": "scripted", "prompt": "hello", "max_tokens": 16}
    for _ in range(5):
        httpx.post(f"http://{gateway}/v1/completions", json=body, timeout=60).raise_for_status()
    groups = get("/api/v1/rules")["data"]["groups"]
    until(lambda: all(r["health"] == "ok" for g in get("/api/v1/rules")["data"]["groups"] for r in g["rules"]), "rules")
    told = {text: get("/api/v1/query", query=text) for text in expressions()}
    quiet = sorted(firing())
    os.kill(pid, signal.SIGSTOP)
    try:
        fired_after = until(lambda: ALERT in firing(), "the alert does not fire")
    finally:
        os.kill(pid, signal.SIGCONT)
    return {
        "targets_up": len(addresses),
        "rules": sum(len(group["rules"]) for group in groups),
        "panels_expressions": len(told),
        "expressions_with_an_error": [text for text, answer in told.items() if answer["status"] != "success"],
        "expressions_with_data": sum(bool(answer["data"]["result"]) for answer in told.values()),
        "alerts_before_the_fault": quiet,
        "alert": ALERT,
        "fired_after_s": fired_after,
        "silent_again_after_s": until(lambda: ALERT not in firing(), "the alert stays"),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        run_dir, log = Path(directory) / "run", Path(directory) / "up.log"
        command = [sys.executable, "-m", "deploy.cli", "up", "--run-dir", str(run_dir), "--port", "0"]
        with (
            log.open("w") as out,
            subprocess.Popen([*command, "--model", "scripted"], stdout=out, stderr=out) as cluster,
        ):
            try:
                until(lambda: "serving " in log.read_text(), "the cluster does not serve")
                addresses = targets(run_dir)
                told = ask(run_dir, {"command": "status"}, lambda _: None, 30.0)
                pid = next(p["pid"] for p in told["processes"] if p["role"] == "decode")
                (Path(directory) / "prometheus.yml").write_text(configuration(addresses))
                with socket.create_server(("127.0.0.1", 0)) as server:
                    port = server.getsockname()[1]
                words = [
                    "prometheus",
                    f"--config.file={directory}/prometheus.yml",
                    f"--storage.tsdb.path={directory}/db",
                ]
                words += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
                with subprocess.Popen(words) as prometheus:
                    try:
                        base = f"http://127.0.0.1:{port}"
                        until(lambda: is_ready(base), "prometheus does not start")
                        result = watch(base, addresses, pid, str(told["http_address"]))
                    finally:
                        prometheus.terminate()
            finally:
                cluster.terminate()
    print(json.dumps(result, indent=1))
    write_record("prometheus_live", result, note="Prometheus 2.42 of Debian, scrape and evaluation every second")


def is_ready(base: str) -> bool:
    try:
        return httpx.get(base + "/-/ready", timeout=5).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


if __name__ == "__main__":
    main()
