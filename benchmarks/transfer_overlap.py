"""C5: time to the first and to the second token with chunk-wise pulls, with pulls at the end, and on one worker alone.

    python -m benchmarks.transfer_overlap [--models smollm2,v41-tiny] [--transfer tcp] [--rounds 9] [--record NAME]

Three clusters of the same model run side by side and are asked in turn, one request at a time and a new prompt for each,
so nothing is cached; each worker computes with one thread. The first token does not wait for pages; the second does: the difference of the two clusters of
a pair is what the overlap hides.
"""

import argparse
import contextlib
import http.client
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.record import write_record

START_S = 240.0
SETUPS = {
    "chunk_wise": ("--prefill", "1", "--decode", "1", "--set", "decode:transfer.pull_chunks=true"),
    "at_the_end": ("--prefill", "1", "--decode", "1", "--set", "decode:transfer.pull_chunks=false"),
    "one_worker": ("--prefill", "0", "--decode", "1", "--prefill-mode", "local"),
}
PROMPT_WORDS = {"smollm2": 320, "v41-tiny": 60}


@contextlib.contextmanager
def cluster(model: str, transfer: str, flags: tuple[str, ...]) -> Iterator[str]:
    """Run `tandem up`; yields the gateway's address."""
    with tempfile.TemporaryDirectory(prefix="tandem-overlap-") as directory:
        command = [sys.executable, "-m", "deploy.cli", "up", "--run-dir", directory, "--port", "0", "--model", model]
        command += ["--transfer", transfer, "--set", "all:engine.chunk_tokens=64"]
        command += ["--set", "all:model.threads=1", *flags]
        log = Path(directory) / "up.log"
        with log.open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, cwd=Path(__file__).parents[1])
        try:
            yield _address(process, log)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        for line in log.read_text().splitlines():
            if "http://" in line:
                return line.split("http://", 1)[1].split()[0].split("/")[0].rstrip(".,")
        time.sleep(0.1)
    raise RuntimeError(f"the cluster does not serve: {log.read_text()[-2000:]}")


def ask(address: str, model: str, prompt: str) -> tuple[float, float, int]:
    """Return seconds to the first and to the second token, and the prompt's tokens."""
    host, port = address.rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=120)
    body = {"model": model, "prompt": prompt, "max_tokens": 3, "temperature": 0, "stream": True, "ignore_eos": True}
    body |= {"logprobs": 0, "stream_options": {"include_usage": True}}
    start, times, prompt_tokens = time.perf_counter(), [], 0
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    for line in connection.getresponse():
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        assert "error" not in event, event
        for choice in event["choices"]:
            # Tokens are counted by their log probabilities: a token need not have text of its own.
            count = len((choice.get("logprobs") or {}).get("tokens") or [])
            times += [time.perf_counter() - start] * count
        prompt_tokens = (event.get("usage") or {}).get("prompt_tokens", prompt_tokens)
    connection.close()
    return times[0], times[1], prompt_tokens


def prompt_of(rng: random.Random, words: int) -> str:
    return " ".join("".join(rng.choices("abcdefghijklmnop", k=4)) for _ in range(words))


def compare(model: str, transfer: str, rounds: int) -> dict[str, object]:
    """All setups of one model."""
    rng = random.Random(5)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in SETUPS}
    tokens = 0
    with contextlib.ExitStack() as stack:
        addresses = {name: stack.enter_context(cluster(model, transfer, flags)) for name, flags in SETUPS.items()}
        for turn in range(rounds + 1):
            prompt = prompt_of(rng, PROMPT_WORDS[model])
            for name in list(addresses)[:: 1 if turn % 2 else -1]:
                first, second, tokens = ask(addresses[name], model, prompt)
                if turn:  # the first round warms up
                    seconds[name].append((first, second))
    return {
        "model": model,
        "transfer": transfer,
        "prompt_tokens_of_the_last": tokens,
        "rounds": rounds,
        "setups": {name: _row(values) for name, values in seconds.items()},
    }


def _row(values: list[tuple[float, float]]) -> dict[str, object]:
    def of(numbers: list[float]) -> dict[str, float]:
        return {"median_ms": round(1e3 * statistics.median(numbers), 1), "max_ms": round(1e3 * max(numbers), 1)}

    firsts, seconds = [first for first, _ in values], [second for _, second in values]
    return {
        "first_token": of(firsts),
        "second_token": of(seconds),
        "second_after_first": of([b - a for a, b in values]),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="smollm2,v41-tiny")
    parser.add_argument("--transfer", default="tcp")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--record", default="")
    options = parser.parse_args()
    load = psutil.getloadavg()[0]
    result = [compare(model, options.transfer, options.rounds) for model in options.models.split(",")]
    print(json.dumps(result, indent=1))
    if options.record:
        note = f"load average at the start {load:.1f}, at the end {psutil.getloadavg()[0]:.1f}, on a shared machine"
        write_record(options.record, result, note=note)


if __name__ == "__main__":
    main()
