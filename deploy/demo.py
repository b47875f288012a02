"""`tandem demo`: one whole cluster with a real small model, one streamed answer, the figures behind it, and no trace.

Figures are read from the running processes, never computed from wishes: the demo fails if the prompt's KV was not
pulled, if both ends count different bytes, if decode had to recompute, or if anything is left behind.
"""

import asyncio
import http.client
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from core.clock import SystemClock
from core.ids import fresh_incarnation
from core.rpc.admin import AdminClient
from core.rpc.proof import Proof
from deploy.local.launcher import Launcher
from deploy.local.models import cache_directory, model_directory
from deploy.local.spec import ClusterSpec
from deploy.sweep import leftovers

MAX_TOKENS = 64
DOWN_BUDGET_S = 10.0
LINE_CHARS = 100


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer as a client saw it."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    first_s: float
    total_s: float

    @property
    def tokens_per_s(self) -> float:
        """Output tokens after the first per second after the first."""
        return (self.completion_tokens - 1) / max(1e-9, self.total_s - self.first_s)


def run_demo(*, model: str, transfer: str, question: str, report: Callable[[str], None]) -> int:
    """Run the whole demo; 0 if every promise held."""
    model_dir = model_directory(model, cache_directory(), report)
    run_dir = Path(tempfile.mkdtemp(prefix="tandem-demo-"))
    spec = ClusterSpec(name="demo", model=model, port=0, transfer=transfer)
    try:
        faults, pids = asyncio.run(_run(spec, run_dir, model_dir, question, report))
        faults += leftovers(pids, run_dir)
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
    for fault in faults:
        report(f"FAULT: {fault}")
    report(
        "the demo held every promise: no process, port or shared-memory segment is left"
        if not faults
        else "the demo failed"
    )
    return 1 if faults else 0


async def _run(
    spec: ClusterSpec, run_dir: Path, model_dir: Path, question: str, report: Callable[[str], None]
) -> tuple[list[str], list[int]]:
    report("starting 1 gateway + 1 prefill worker + 1 decode worker")
    launcher = Launcher(spec=spec, run_dir=run_dir, model_dir=model_dir, clock=SystemClock(), report=report)
    try:
        await launcher.start()
        described = launcher.describe()
        processes = cast("list[dict[str, object]]", described["processes"])
        pids = [cast("int", p["pid"]) for p in processes]
        report(f"question: {question}")
        answer = await asyncio.to_thread(
            stream_answer,
            str(described["http_address"]),
            spec.model,
            question,
            lambda text: print(text, end="", flush=True),
        )
        print(flush=True)
        secret = (run_dir / "secret").read_text().strip().encode()
        faults = await _figures(processes, AdminClient(Proof(secret, fresh_incarnation())), answer, report)
    finally:
        await launcher.down(DOWN_BUDGET_S)
    return faults, pids


async def _figures(
    processes: list[dict[str, object]], admin: AdminClient, answer: Answer, report: Callable[[str], None]
) -> list[str]:
    address = {str(p["role"]): str(p["address"]) for p in processes if "address" in p}
    prefill = await admin.statistics(address["prefill"], audit=True)
    decode = await admin.statistics(address["decode"], audit=True)
    pulled = decode.values["transfer_bytes_pulled"]
    served = prefill.values["transfer_bytes_handed_over"]
    recomputed = decode.values["engine_recomputed_tokens"]
    report(f"time to first token      {answer.first_s * 1000:.0f} ms ({answer.prompt_tokens} prompt tokens)")
    report(f"decode speed             {answer.tokens_per_s:.1f} tokens/s ({answer.completion_tokens} tokens)")
    report(f"KV pulled by decode      {pulled:.0f} bytes")
    report(f"KV handed over, prefill  {served:.0f} bytes")
    report(f"recomputed by decode     {recomputed:.0f} tokens")
    faults = [*prefill.audit_findings, *decode.audit_findings]
    if not answer.text.strip():
        faults.append("the answer is empty")
    if pulled <= 0 or pulled != served:
        faults.append(f"decode pulled {pulled:.0f} bytes but prefill handed over {served:.0f}")
    if recomputed:
        faults.append(f"decode computed {recomputed:.0f} prompt tokens again")
    return faults


def stream_answer(address: str, model: str, question: str, on_text: Callable[[str], None]) -> Answer:
    """Ask one question as any client would, with nothing but HTTP."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    host, port = address.rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=120)
    start = time.monotonic()
    first_s, text, usage = 0.0, "", {"prompt_tokens": 0, "completion_tokens": 0}
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise RuntimeError(f"the gateway answered {response.status}: {response.read().decode(errors='replace')}")
        for event in _events(response):
            if event.get("usage"):
                usage = cast("dict[str, int]", event["usage"])
            for choice in cast("list[dict[str, dict[str, str]]]", event.get("choices") or []):
                piece = choice["delta"].get("content") or ""
                if piece and not text:
                    first_s = time.monotonic() - start
                text += piece
                on_text(piece)
    finally:
        connection.close()
    return Answer(text, usage["prompt_tokens"], usage["completion_tokens"], first_s, time.monotonic() - start)


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, object]]:
    for raw in response:
        line = raw.decode().strip()
        if line.startswith("data: ") and line != "data: [DONE]":
            event = cast("dict[str, object]", json.loads(line[6:]))
            if "error" in event:
                raise RuntimeError(f"the stream ended with an error: {event['error']}")
            yield event
