"""How each public load client is installed and called, and what its report says it counted.

All send `REQUESTS` streaming requests of `OUTPUT` tokens at most, `STREAMS` at a time, without warm-up, and are told to
take the tokenizer from a directory; nothing is fetched. `sglang` and `vllm` run without the engine around them.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.fakes import bare_client

REQUESTS = 16
STREAMS = 4
INPUT = 60
OUTPUT = 12
LIGHT = ("aiohttp", "numpy", "tqdm", "transformers", "pillow", "psutil", "msgspec", "pydantic", "requests", "orjson")
"""What the clients inside the two engines' wheels import."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a client is called with."""

    environment: Path
    """A virtual environment with the client."""
    base_url: str
    model: str
    tokenizer: Path
    out: Path
    """An empty directory for its files."""


@dataclass(frozen=True, slots=True)
class Counted:
    """What a client says about its run."""

    num_requests: int
    num_errors: int
    output_tokens: int
    prompt_tokens: int | None
    """None from a client that counts its text and not the prompt with the chat template."""


@dataclass(frozen=True, slots=True)
class Client:
    """One public client."""

    name: str
    version: str
    route: str
    requirements: tuple[str, ...]
    call: Callable[[Task], list[str]]
    count: Callable[[Path], Counted]
    without_dependencies: tuple[str, ...] = ()
    max_left: int = 0
    """How many requests it may leave unfinished once it has enough; it may then have asked for more than `REQUESTS`."""


def flags(given: Mapping[str, object]) -> list[str]:
    """Spell flags with values."""
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


def call_aiperf(task: Task) -> list[str]:
    given = {
        "model": task.model,
        "url": task.base_url,
        "endpoint-type": "chat",
        "tokenizer": task.tokenizer,
        "concurrency": STREAMS,
        "request-count": REQUESTS,
        "isl": INPUT,
        "osl": OUTPUT,
        "extra-inputs": "ignore_eos:true",
        "artifact-dir": task.out,
        "ui": "none",
    }
    return [str(task.environment / "bin/aiperf"), "profile", "--streaming", *flags(given)]


def count_aiperf(out: Path) -> Counted:
    records = [json.loads(line) for line in (out / "profile_export.jsonl").read_text().splitlines()]

    def total(name: str) -> int:
        return sum(int(record["metrics"][name]["value"]) for record in records)

    return Counted(
        num_requests=len(records),
        num_errors=sum(bool(record.get("error")) for record in records),
        output_tokens=total("usage_completion_tokens"),
        prompt_tokens=total("usage_prompt_tokens"),
    )


def call_guidellm(task: Task) -> list[str]:
    given = {
        "backend": f"kind=openai_http,target={task.base_url},model={task.model}",
        "profile": f"kind=concurrent,streams={STREAMS}",
        "constraint": f"kind=max_requests,count={REQUESTS}",
        "tokenizer": f"kind=hf_auto,model={task.tokenizer}",
        "data": f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}",
        "output": f"kind=json,path={task.out / 'report.json'}",
    }
    return [str(task.environment / "bin/guidellm"), "run", "--disable-progress", *flags(given)]


def count_guidellm(out: Path) -> Counted:
    (benchmark,) = json.loads((out / "report.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    done = requests["successful"]
    return Counted(
        num_requests=len(done),
        num_errors=len(requests["errored"]) + len(requests["incomplete"]),
        output_tokens=sum(request["output_tokens"] for request in done),
        prompt_tokens=sum(request["prompt_tokens"] for request in done),
    )


def call_genai_bench(task: Task) -> list[str]:
    given = {
        "api-backend": "openai",
        "api-base": task.base_url,
        "api-key": "none",
        "api-model-name": task.model,
        "model-tokenizer": task.tokenizer,
        "task": "text-to-text",
        "traffic-scenario": f"D({INPUT},{OUTPUT})",
        "num-concurrency": STREAMS,
        "max-time-per-run": 14,
        "max-requests-per-run": REQUESTS,
        "server-engine": "vLLM",
        "server-gpu-type": "H200",
        "server-version": "0",
        "server-gpu-count": 1,
        "experiment-base-dir": task.out,
    }
    return [str(task.environment / "bin/genai-bench"), "benchmark", *flags(given)]


def count_genai_bench(out: Path) -> Counted:
    (report,) = out.glob("*/D*.json")
    told = json.loads(report.read_text())
    requests = told["individual_request_metrics"]
    return Counted(
        num_requests=told["aggregated_metrics"]["num_completed_requests"],
        num_errors=told["aggregated_metrics"]["num_error_requests"],
        output_tokens=sum(request["num_output_tokens"] for request in requests),
        prompt_tokens=sum(request["num_input_tokens"] for request in requests),
    )


def call_inference_perf(task: Task) -> list[str]:
    def always(length: int) -> dict[str, int]:
        return {"min": length, "max": length, "mean": length, "std_dev": 0, "total_count": REQUESTS}

    config = {
        "load": {"type": "concurrent", "stages": [{"num_requests": REQUESTS, "concurrency_level": STREAMS}]},
        "api": {"type": "completion", "streaming": True},
        "server": {"type": "vllm", "model_name": task.model, "base_url": task.base_url, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": str(task.tokenizer)},
        "data": {"type": "random", "input_distribution": always(INPUT), "output_distribution": always(OUTPUT)},
        "report": {"request_lifecycle": {"summary": True}},
        "storage": {"local_storage": {"path": str(task.out / "reports")}},
    }
    path = task.out / "config.yml"
    path.write_text(yaml.safe_dump(config))
    return [str(task.environment / "bin/inference-perf"), "--config_file", str(path)]


def count_inference_perf(out: Path) -> Counted:
    told = json.loads((out / "reports/summary_lifecycle_metrics.json").read_text())
    done = told["successes"]
    return Counted(
        num_requests=done["count"],
        num_errors=told["failures"]["count"],
        output_tokens=int(done["output_tokens"]["total"]),
        prompt_tokens=int(done["prompt_tokens"]["total"]),
    )


def call_bare(package: str, task: Task, given: Mapping[str, object]) -> list[str]:
    shared = {
        "base-url": task.base_url,
        "model": task.model,
        "tokenizer": task.tokenizer,
        "random-input-len": INPUT,
        "random-output-len": OUTPUT,
        "num-prompts": REQUESTS,
        "max-concurrency": STREAMS,
    }
    python = str(task.environment / "bin/python")
    return [python, str(bare_client.__file__), package, "--disable-tqdm", *flags({**shared, **given})]


def call_sglang(task: Task) -> list[str]:
    given = {
        "backend": "vllm-chat",
        "dataset-name": "random-ids",
        "random-range-ratio": 1.0,
        "warmup-requests": 0,
        "output-file": task.out / "report.json",
        "extra-request-body": json.dumps({"stream_options": {"include_usage": True}}),
    }
    return [*call_bare("sglang", task, given), "--output-details"]


def count_sglang(out: Path) -> Counted:
    told = json.loads((out / "report.json").read_text())
    errors = sum(bool(error) for error in told["errors"])
    return Counted(told["completed"], errors, told["total_output_tokens"], None)


def call_vllm(task: Task) -> list[str]:
    given = {
        "backend": "openai-chat",
        "endpoint": "/v1/chat/completions",
        "dataset-name": "random",
        "result-filename": task.out / "report.json",
    }
    return [*call_bare("vllm", task, given), "--ignore-eos", "--save-result"]


def count_vllm(out: Path) -> Counted:
    told = json.loads((out / "report.json").read_text())
    return Counted(told["completed"], told["failed"], told["total_output_tokens"], told["total_input_tokens"])


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_ALL = (
    Client("aiperf", "0.13.0", CHAT, ("aiperf==0.13.0",), call_aiperf, count_aiperf),
    Client("guidellm", "0.8.1", CHAT, ("guidellm==0.8.1",), call_guidellm, count_guidellm),
    Client(
        "genai-bench",
        "0.0.5",
        CHAT,
        ("genai-bench==0.0.5",),
        call_genai_bench,
        count_genai_bench,
        max_left=STREAMS,
    ),
    Client("inference-perf", "0.7.0", TEXT, ("inference-perf==0.7.0",), call_inference_perf, count_inference_perf),
    Client("sglang", "0.5.23", CHAT, LIGHT, call_sglang, count_sglang, ("sglang==0.5.23",)),
    Client(
        "vllm", "0.33.0", CHAT, (*LIGHT, "cloudpickle", "regex", "filelock"), call_vllm, count_vllm, ("vllm==0.33.0",)
    ),
)
CLIENTS = {client.name: client for client in _ALL}
