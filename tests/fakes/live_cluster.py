"""A real local cluster for tests: `tandem up` as a subprocess, asked through its control socket, never a mock."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from deploy.local.control import ask

ROOT = Path(__file__).resolve().parents[2]
START_S = 120


class Cluster:
    """One running cluster; use `running_cluster`."""

    def __init__(self, process: subprocess.Popen, run_dir: Path, model: str, log: Path) -> None:
        self.process = process
        self.run_dir = run_dir
        self.model = model
        self.log = log

    def status(self) -> dict:
        return ask(self.run_dir, {"command": "status"}, lambda _: None, timeout_s=60)

    def processes(self, role: str | None = None) -> list[dict]:
        return [p for p in self.status()["processes"] if role is None or p["role"] == role]

    @property
    def base_url(self) -> str:
        return f"http://{self.status()['http_address']}"

    def worker(self, worker_id: str) -> dict:
        return next(p for p in self.processes() if p["id"] == worker_id)

    def kill(self, worker_id: str, number: int = signal.SIGKILL) -> int:
        """Kill a process and wait until the launcher has noticed."""
        pid = self.worker(worker_id)["pid"]
        os.kill(pid, number)
        wait_for(lambda: self.worker(worker_id)["pid"] != pid, 60, f"the end of {worker_id} was not noticed")
        return pid

    def wait_ready(self, count: int, timeout_s: float = 60) -> None:
        wait_for(
            lambda: sum(p["state"] == "ready" for p in self.processes()) == count, timeout_s, "processes not ready"
        )

    def cli(self, *arguments: str, timeout_s: float = 170) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "deploy.cli", arguments[0], "--run-dir", str(self.run_dir), *arguments[1:]],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def logs(self) -> str:
        return "\n".join(f"== {p.name}\n{p.read_text()[-4000:]}" for p in sorted(self.run_dir.glob("*.log")))


def wait_for(condition, timeout_s: float, what: str):
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"{what} within {timeout_s} s")


def serving(log: Path) -> bool:
    return log.exists() and "serving " in log.read_text()


@contextlib.contextmanager
def running_cluster(tmp_path: Path, *flags: str, model: str = "scripted"):
    """Start `tandem up` with a free port, wait until it serves, end it; leftovers are a failure."""
    run_dir = tmp_path / "run"
    run_dir.mkdir(parents=True, exist_ok=True)
    log = tmp_path / "up.log"
    command = [sys.executable, "-m", "deploy.cli", "up", "--run-dir", str(run_dir), "--port", "0"]
    command += ["--model", model, "--drain-s", "10", *flags]
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    cluster = Cluster(process, run_dir, model, log)
    try:
        wait_for(lambda: serving(log) or process.poll() is not None, START_S, "the cluster does not serve")
        assert process.poll() is None, log.read_text() + cluster.logs()
        yield cluster
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == 0, log.read_text()
    assert leftovers(cluster) == [], f"left in the run directory: {leftovers(cluster)}"


def leftovers(cluster: Cluster) -> list[str]:
    """Names of sockets, locks and ready files that an ended cluster left behind; logs and journals stay."""
    return [p.name for p in cluster.run_dir.iterdir() if p.suffix not in {".log", ".jsonl", ""}]


def complete(base_url: str, body: dict, timeout_s: float = 60) -> dict:
    """POST a completion and return the decoded answer (any status)."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return httpx.post(base_url + path, json=body, timeout=timeout_s).json()


def stream_text(base_url: str, body: dict, on_text=None, timeout_s: float = 60) -> dict:
    """Stream a completion; returns text, finish, usage, error and whether [DONE] ended it."""
    result = {"text": "", "finish": None, "usage": None, "error": None, "done": False}
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    with httpx.stream("POST", base_url + path, json={**body, "stream": True}, timeout=timeout_s) as response:
        result["status"] = response.status_code
        if response.status_code != 200:
            response.read()
            result["error"] = response.json()["error"]
            return result
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                result["done"] = True
                continue
            event = json.loads(line[6:])
            if "error" in event:
                result["error"] = event["error"]
                continue
            if event.get("usage"):
                result["usage"] = event["usage"]
            for choice in event.get("choices", []):
                piece = choice.get("text") if "text" in choice else choice.get("delta", {}).get("content")
                result["text"] += piece or ""
                result["finish"] = choice.get("finish_reason") or result["finish"]
                if piece and on_text is not None:
                    on_text(result["text"])
    return result
