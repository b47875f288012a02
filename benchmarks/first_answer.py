"""Seconds from `tandem up` to the first token of the first answer, with the phases between, on this machine.

A phase of a worker is what its own metric says (`tandem_worker_phase_seconds`); the rest is seen from outside.

    python -m benchmarks.first_answer [--model NAME ...]
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.record import write_record
from deploy.local.control import ask

ROUNDS = 3
PHASES = re.compile(r'^tandem_worker_phase_seconds\{state="(\w+)"\} (\S+)$', re.MULTILINE)


def one_start(model: str) -> dict[str, object]:
    """Start 1 + 1 + 1, ask once, end it; seconds since the command was started."""
    with tempfile.TemporaryDirectory() as directory:
        run_dir, log = Path(directory) / "run", Path(directory) / "up.log"
        command = [sys.executable, "-m", "deploy.cli", "up", "--run-dir", str(run_dir), "--port", "0", "--model", model]
        begun = time.monotonic()
        with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as up:
            try:
                marks = {"gateway ready": 0.0, "serving": 0.0}
                while not marks["serving"]:
                    assert up.poll() is None, log.read_text()
                    text, now = log.read_text(), round(time.monotonic() - begun, 2)
                    for mark, word in (("gateway ready", "gateway-1: ready"), ("serving", "serving ")):
                        marks[mark] = marks[mark] or (now if word in text else 0.0)
                    time.sleep(0.02)
                told = ask(run_dir, {"command": "status"}, lambda _: None, 30.0)
                first = ask_once(f"http://{told['http_address']}", model)
                marks["first token"] = round(time.monotonic() - begun, 2)
                workers = [p for p in told["processes"] if p["role"] != "gateway"]
                phases = {p["id"]: phases_of(p["http_address"]) for p in workers}
                begun_down = time.monotonic()
            finally:
                up.terminate()
                up.wait()
        return {
            "since_start_s": marks,
            "request_s": first,
            "down_s": round(time.monotonic() - begun_down, 2),
            "worker_phase_s": phases,
        }


def ask_once(base_url: str, model: str) -> float:
    """Return the seconds from a request to its first token."""
    begun = time.monotonic()
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": 8, "stream": True}
    with httpx.stream("POST", base_url + "/v1/completions", json=body, timeout=120) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                return round(time.monotonic() - begun, 3)
    raise RuntimeError("the stream had no token")


def phases_of(address: str) -> dict[str, float]:
    """Return how long a worker was in each state before it was ready."""
    text = httpx.get(f"http://{address}/metrics", timeout=30).text
    return {state: round(float(seconds), 2) for state, seconds in PHASES.findall(text) if float(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", nargs="+", default=["scripted", "smollm2"])
    before = os.getloadavg()[0]
    result: dict[str, object] = {
        model: [one_start(model) for _ in range(ROUNDS)] for model in parser.parse_args().model
    }
    result["load average, before and after"] = [before, os.getloadavg()[0]]
    print(json.dumps(result, indent=1))
    write_record("first_answer_local", result, note="shared machine, other work running; 1 gateway, 1 + 1 workers")


if __name__ == "__main__":
    main()
