"""Runs public load clients against a whole cluster: none of their requests fails, and their counts are the gateway's.

`python -m benchmarks.clients_run [NAME...] --environments DIR [--python PATH] [--model NAME] [--record]`. Each client has
a virtual environment `DIR/NAME` of its own, made there with pip if it is missing; none is a dependency. Loopback only,
bounded in requests and time. Raises at the first difference. `HF_HUB_OFFLINE` must not be set (aiperf), and
inference-perf needs a Python of 3.12 or later (`--python`).
"""

import argparse
import contextlib
import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.clients_commands import CLIENTS, REQUESTS, Client, Counted, Task
from benchmarks.record import write_record
from deploy.local.control import ask
from deploy.local.models import cache_directory, model_directory
from engine.models.manifest import make_directory
from engine.models.script import ScriptedConfig

START_S = 180.0
CLIENT_S = 900.0
CLIENT_LEFT = 499
"""Status of an answer that its client did not wait for."""
NOTE = "one prefill and one decode worker over shared memory; every request streams; on a busy machine, so no latencies"
LIGHT_MODEL = "scripted-smollm2"


def write_light_model(directory: Path) -> Path:
    """Write a model that costs nothing and reads the text of a real one's tokenizer: some clients need its words."""
    real = model_directory("smollm2", cache_directory(), print)

    def fill(target: Path) -> None:
        config = ScriptedConfig(vocab_size=49_152, eos_token_id=2)
        (target / "config.json").write_bytes(msgspec.json.encode(config))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(real / name, target / name)

    return make_directory(directory / LIGHT_MODEL, LIGHT_MODEL, fill)


def read_access_log(log: Path, route: str, start: int) -> list[dict[str, Any]]:
    """Read what the gateway wrote about the requests of one route, from a place of its log on."""
    lines = [json.loads(line) for line in log.read_bytes()[start:].splitlines() if line.startswith(b"{")]
    return [line for line in lines if line.get("path") == route]


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


def compare(client: Client, counted: Counted, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return both sides' counts; RuntimeError if they differ or a request failed."""
    whole = [answer for answer in answers if answer["status"] == HTTPStatus.OK]
    ours = Counted(
        num_requests=len(whole),
        num_errors=sum(answer["status"] not in (HTTPStatus.OK, CLIENT_LEFT) for answer in answers),
        output_tokens=sum(answer["completion_tokens"] for answer in whole),
        prompt_tokens=sum(answer["prompt_tokens"] for answer in whole),
    )
    num_left = len(answers) - len(whole) - ours.num_errors
    both = {
        "by client": dataclasses.asdict(counted),
        "by gateway": dataclasses.asdict(ours),
        "left by client": num_left,
    }
    expected = dataclasses.replace(ours, prompt_tokens=ours.prompt_tokens if counted.prompt_tokens else None)
    is_enough = ours.num_requests == REQUESTS or (client.max_left and ours.num_requests > REQUESTS)
    if counted != expected or ours.num_errors or not is_enough or num_left > client.max_left:
        raise RuntimeError(f"requests failed or the counts differ: {both}")
    return both


@contextlib.contextmanager
def running_cluster(model: str, directory: Path) -> Generator[tuple[str, str, Path]]:
    """Start a prefill and a decode worker behind a gateway, yield its address, model and log, end them."""
    run_dir, log = directory / "run", directory / "up.log"
    command = [
        sys.executable,
        "-m",
        "deploy.cli",
        "up",
        "--run-dir",
        str(run_dir),
        "--port",
        "0",
        "--model",
        model,
    ]
    with log.open("w") as out:
        cluster = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + START_S
        while "serving " not in log.read_text():
            if cluster.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(log.read_text())
            time.sleep(0.2)
        (gateway_log,) = run_dir.glob("gateway-*.log")
        status = ask(run_dir, {"command": "status"}, print)
        yield str(status["http_address"]), str(status["model"]), gateway_log
    finally:
        cluster.send_signal(signal.SIGTERM)
        cluster.wait(90)


def main() -> None:
    """Run, print, and with `--record` keep the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)}; all without names")
    parser.add_argument("--environments", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable, help="for environments that are missing")
    parser.add_argument("--model", help="a light model with a real tokenizer unless given")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        tokenizer = (
            model_directory(options.model, cache_directory(), print) if options.model else write_light_model(work)
        )
        result: dict[str, object] = {"model": options.model or LIGHT_MODEL}
        with running_cluster(options.model or str(tokenizer), work) as (address, served, log):
            for client in (CLIENTS[name] for name in options.names or CLIENTS):
                make_environment(client, options.environments.absolute() / client.name, options.python)
                out = work / client.name
                out.mkdir()
                start = log.stat().st_size
                task = Task(options.environments.absolute() / client.name, f"http://{address}", served, tokenizer, out)
                counted = run_client(client, task)
                both = compare(client, counted, read_access_log(log, client.route, start))
                result[client.name] = {"version": client.version, "route": client.route, **both}
                print(client.name, json.dumps(result[client.name]), flush=True)
                if options.record:
                    write_record("clients", result, note=NOTE)


if __name__ == "__main__":
    main()
