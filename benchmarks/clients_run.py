"""Runs public load clients against a whole cluster: none of their requests fails, and their counts are the gateway's.

`python -m benchmarks.clients_run [NAME...] --environments DIR [--python PATH] [--model NAME] [--record]`. Each client has
a virtual environment `DIR/NAME` of its own, made there with pip if it is missing; none is a dependency. Loopback only,
bounded in requests and time. Raises at the first difference. `HF_HUB_OFFLINE` must not be set (aiperf), and
inference-perf needs a Python of 3.12 or later (`--python`).
"""

import argparse
import contextlib
import dataclasses
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from pathlib import Path

from benchmarks.clients_commands import CLIENTS, OUTPUT, REQUESTS, Client, Counted, Task
from benchmarks.record import write_record
from deploy.local.control import ask
from deploy.local.models import cache_directory, model_directory

START_S = 180.0
CLIENT_S = 900.0
ANSWERED = re.compile(r'tandem_http_requests_total\{route="(?P<route>[^"]*)",status="(?P<status>\d+)"\} (?P<count>\S+)')
TOKENS = re.compile(r"(?m)^tandem_http_(?P<kind>prompt|completion)_tokens_total (?P<count>\S+)")


def read_counters(address: str, route: str) -> dict[str, int]:
    """Read from /metrics: answers of one route by status, and tokens."""
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    found = {
        match["status"]: int(float(match["count"])) for match in ANSWERED.finditer(text) if match["route"] == route
    }
    return found | {match["kind"]: int(float(match["count"])) for match in TOKENS.finditer(text)}


def make_environment(client: Client, directory: Path, python: str) -> None:
    """Install a client with pip, once."""
    if directory.exists():
        return
    subprocess.run([python, "-m", "venv", str(directory)], check=True)
    pip = [str(directory / "bin/python"), "-m", "pip", "install", "-q"]
    subprocess.run([*pip, *client.requirements], check=True)
    if client.without_dependencies:
        subprocess.run([*pip, "--no-deps", *client.without_dependencies], check=True)


def run_client(client: Client, task: Task) -> Counted:
    """Run a client to its end and read its report; RuntimeError with its last words if it fails."""
    done = subprocess.run(
        client.call(task),
        capture_output=True,
        text=True,
        timeout=CLIENT_S,
        check=False,
        cwd=task.out,
    )
    if done.returncode:
        raise RuntimeError(f"the client ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return client.count(task.out)


def compare(counted: Counted, before: dict[str, int], after: dict[str, int]) -> Mapping[str, object]:
    """Return both sides' counts; RuntimeError if they differ or a request failed."""
    ours = {name: after[name] - before.get(name, 0) for name in after}
    answers = {status: ours[status] for status in ours if status.isdigit() and ours[status]}
    both = {"by client": dataclasses.asdict(counted), "by gateway": {"answers": answers, **tokens(ours)}}
    prompts = counted.prompt_tokens
    if (
        counted.num_errors
        or counted.num_requests != REQUESTS
        or counted.output_tokens != REQUESTS * OUTPUT
        or answers != {"200": REQUESTS}
        or ours["completion"] != counted.output_tokens
        or prompts not in (None, ours["prompt"])
    ):
        raise RuntimeError(f"requests failed or the counts differ: {both}")
    return both


def tokens(ours: dict[str, int]) -> dict[str, int]:
    """Name the gateway's counts as the client's."""
    return {"output_tokens": ours["completion"], "prompt_tokens": ours["prompt"]}


@contextlib.contextmanager
def running_cluster(model: str, directory: Path) -> Generator[str]:
    """Start a prefill and a decode worker behind a gateway, yield its address, end them."""
    run_dir, log = directory / "run", directory / "up.log"
    command = [sys.executable, "-m", "deploy.cli", "up", "--run-dir", str(run_dir), "--port", "0", "--model", model]
    with log.open("w") as out:
        cluster = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + START_S
        while "serving " not in log.read_text():
            if cluster.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(log.read_text())
            time.sleep(0.2)
        yield str(ask(run_dir, {"command": "status"}, print)["http_address"])
    finally:
        cluster.send_signal(signal.SIGTERM)
        cluster.wait(90)


def main() -> None:
    """Run, print, and with `--record` keep the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)}; all without names")
    parser.add_argument("--environments", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable, help="for environments that are missing")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    tokenizer = model_directory(options.model, cache_directory(), print)
    result: dict[str, object] = {"model": options.model}
    with tempfile.TemporaryDirectory() as work, running_cluster(options.model, Path(work)) as address:
        for name in options.names or CLIENTS:
            client = CLIENTS[name]
            environment = options.environments.absolute() / name
            make_environment(client, environment, options.python)
            out = Path(work) / name
            out.mkdir()
            before = read_counters(address, client.route)
            counted = run_client(client, Task(environment, f"http://{address}", options.model, tokenizer, out))
            both = compare(counted, before, read_counters(address, client.route))
            result[name] = {"version": client.version, "route": client.route, **both}
            print(name, json.dumps(result[name]), flush=True)
    if options.record:
        note = "one prefill and one decode worker over shared memory; every request streams; load of the machine: "
        print(write_record("clients", result, note=f"{note}{os.getloadavg()[0]:.0f} on {os.cpu_count()} cores").name)


if __name__ == "__main__":
    main()
