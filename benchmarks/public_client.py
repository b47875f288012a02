"""Runs a public load client (aiperf) against a whole cluster and compares its token counts with ours.

``python -m benchmarks.public_client --aiperf PATH [--model smollm2] [--record]``. The client lives in an environment of
its own (``pip install aiperf==0.13.0``); it is never a dependency. Loopback only, bounded in requests and time. For output
tokens our usage per request and the gateway's counter must agree exactly, and the client must find at least 98 % of
them by encoding the text again. For plain completions all three must agree on prompts; chat adds the template.
"""

import argparse
import http.client
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.record import write_record
from deploy.local.control import ask
from deploy.local.models import cache_directory, model_directory

START_S = 180.0
CLIENT_S = 420.0
MIN_VISIBLE = 0.98
"""Share of output tokens that must be found again by encoding the text."""
COUNTERS = ("tandem_http_prompt_tokens_total", "tandem_http_completion_tokens_total")


def counters(address: str) -> dict[str, float]:
    """Read the gateway's token counters from its own /metrics."""
    host, port = address.rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return {
        name: sum(float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith((name + " ", name + "{")))
        for name in COUNTERS
    }


def run_client(
    options: argparse.Namespace, address: str, tokenizer: Path, kind: str, out: Path
) -> list[dict[str, object]]:
    """Run aiperf once and return its per-request records."""
    command = [
        options.aiperf,
        "profile",
        "--model",
        options.model,
        "--url",
        f"http://{address}",
        "--endpoint-type",
        kind,
    ]
    command += ["--streaming", "--tokenizer", str(tokenizer), "--concurrency", str(options.concurrency)]
    command += ["--request-count", str(options.requests), "--isl", str(options.isl), "--osl", str(options.osl)]
    command += ["--extra-inputs", "ignore_eos:true", "--artifact-dir", str(out), "--ui", "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CLIENT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"the client ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [json.loads(line) for line in (out / "profile_export.jsonl").read_text().splitlines()]


def value(record: dict[str, object], name: str) -> float:
    """Return one metric of one request."""
    metrics = record["metrics"]
    assert isinstance(metrics, dict)
    return float(metrics[name]["value"])


def compare(
    records: list[dict[str, object]], before: dict[str, float], after: dict[str, float], kind: str
) -> dict[str, object]:
    """Return the counts side by side; raises if they differ."""
    counted = {
        "requests": len(records),
        "errors": sum(1 for r in records if r.get("error")),
        "output_tokens_by_client": sum(value(r, "output_sequence_length") for r in records),
        "output_tokens_by_usage": sum(value(r, "usage_completion_tokens") for r in records),
        "output_tokens_by_gateway": after[COUNTERS[1]] - before[COUNTERS[1]],
        "prompt_tokens_by_client": sum(value(r, "input_sequence_length") for r in records),
        "prompt_tokens_by_usage": sum(value(r, "usage_prompt_tokens") for r in records),
        "prompt_tokens_by_gateway": after[COUNTERS[0]] - before[COUNTERS[0]],
    }
    ours_agree = counted["output_tokens_by_usage"] == counted["output_tokens_by_gateway"]
    # The client encodes the text again: a token without text (end of text under ignore_eos) is invisible to it.
    share = counted["output_tokens_by_client"] / max(1.0, counted["output_tokens_by_usage"])
    sides = ("client", "usage", "gateway") if kind == "completions" else ("usage", "gateway")
    prompts = {counted[f"prompt_tokens_by_{side}"] for side in sides}
    if counted["errors"] or not ours_agree or not MIN_VISIBLE <= share <= 1 or len(prompts) != 1:
        raise RuntimeError(f"{kind}: the counts differ or requests failed: {counted}")
    latency = {
        name: sorted(value(r, name) for r in records)[len(records) // 2]
        for name in ("time_to_first_token", "inter_token_latency", "request_latency")
    }
    return {**counted, "median_ms": {name: round(ms, 1) for name, ms in latency.items()}}


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Start a cluster, run the client on both routes, end the cluster."""
    tokenizer = model_directory(options.model, cache_directory(), print)
    work = Path(tempfile.mkdtemp(prefix="tandem-client-"))
    run_dir = work / "run"
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
        options.model,
    ]
    with (work / "up.log").open("w") as log:
        cluster = subprocess.Popen(command, stdout=log, stderr=log)
    result: dict[str, object] = {}
    try:
        deadline = time.monotonic() + START_S
        while "serving " not in (work / "up.log").read_text():
            if cluster.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((work / "up.log").read_text())
            time.sleep(0.2)
        address = str(ask(run_dir, {"command": "status"}, print)["http_address"])
        for kind in ("completions", "chat"):
            before = counters(address)
            records = run_client(options, address, tokenizer, kind, work / kind)
            result[kind] = compare(records, before, counters(address), kind)
            print(kind, json.dumps(result[kind]))
    finally:
        cluster.send_signal(signal.SIGTERM)
        cluster.wait(90)
        shutil.rmtree(work, ignore_errors=True)
    return result


def main() -> None:
    """Run, print, and with `--record` keep the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--aiperf", required=True, help="path of the aiperf command")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--isl", type=int, default=120)
    parser.add_argument("--osl", type=int, default=24)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    version = subprocess.run([options.aiperf, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    result = {"client": f"aiperf {version}", "model": options.model, **measure(options)}
    if options.record:
        print(
            write_record(
                "public_client", result, note="1 prefill + 1 decode worker, shm; output length fixed by ignore_eos"
            ).name
        )


if __name__ == "__main__":
    main()
