"""The real small model through the whole cluster, once for the record (`make long`): equality and chaos.

Deterministic mode makes every logit independent of batch and chunking, so the truth is what one worker that computes
its prompts itself said, and equality is of text, exactly.
"""

import asyncio
import signal
import threading

import httpx
import pytest

from benchmarks.record import write_record
from tests.fakes.audit import findings, statistics
from tests.fakes.chaos import faults, storm
from tests.fakes.live_cluster import complete, running_cluster, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.smollm2, pytest.mark.long, pytest.mark.timeout(1800)]

QUESTIONS = [
    "The capital of France is",
    "Write one sentence about the sea.",
    "Once upon a time there was a fox who",
    "def fibonacci(n):",
    "The three primary colours are",
    "Water boils at",
    "A list of fruits: apple, banana,",
    "My favourite season is winter because",
]
LONG_PROMPT = "The history of the lighthouse is a history of patience. " * 24
MAX_TOKENS = 24


def bodies():
    prompts = [*QUESTIONS, LONG_PROMPT]
    settings = [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "seed": 5}]
    return [{"model": "smollm2", "prompt": p, "max_tokens": MAX_TOKENS, **s} for p in prompts for s in settings]


def texts(cluster):
    return [complete(cluster.base_url, b, 300)["choices"][0]["text"] for b in bodies()]


def texts_together(cluster):
    async def ask():
        async with httpx.AsyncClient(base_url=cluster.base_url, timeout=600) as client:
            replies = await asyncio.gather(*(client.post("/v1/completions", json=b) for b in bodies()))
            return [r.json()["choices"][0]["text"] for r in replies]

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    flags = ("--prefill", "0", "--prefill-mode", "local")
    with running_cluster(tmp_path_factory.mktemp("truth"), *flags, model="smollm2") as cluster:
        return texts(cluster)


@pytest.mark.parametrize("transfer", ["shm", "tcp"])
def test_disaggregated_text_of_the_real_model_equals_the_single_worker(truth, transfer, tmp_path):
    flags = ("--transfer", transfer, "--set", "all:engine.chunk_tokens=64", "--set", "all:engine.audit_every_steps=1")
    with running_cluster(tmp_path, *flags, model="smollm2") as cluster:
        assert texts(cluster) == truth, "chunked, over P/D"
        assert texts_together(cluster) == truth, "batched, after prefix hits"
        pulled = statistics(cluster)["decode-1"].values["transfer_bytes_pulled"]
        assert pulled > 0
        assert findings(cluster) == []
    write_record(
        f"smollm2_equality_{transfer}",
        {"requests": 2 * len(truth), "equal": True, "bytes_pulled": pulled, "example": truth[0]},
        note="P/D, chunked by 64, alone and batched, against one worker in local mode; greedy and seeded; deterministic mode",
    )


def test_the_real_model_survives_chaos(truth, tmp_path):
    items = [(p, truth[2 * i], MAX_TOKENS) for i, p in enumerate([*QUESTIONS, LONG_PROMPT])] * 10
    with running_cluster(tmp_path, "--prefill", "2", "--decode", "2", model="smollm2") as cluster:

        def killer():
            for worker in ("decode-1", "prefill-1"):
                if stop.wait(5):
                    return
                cluster.kill(worker, signal.SIGKILL)
                wait_for(lambda w=worker: cluster.worker(w)["state"] == "ready", 120, f"{worker} is not back")

        stop = threading.Event()
        thread = threading.Thread(target=killer)
        thread.start()
        outcomes = asyncio.run(storm(cluster.base_url, "smollm2", items, concurrency=64, cancel_share=0.15, seed=1))
        stop.set()
        thread.join()
        assert [f for o in outcomes for f in faults(o)] == []
        wait_for(lambda: findings(cluster) == [], 60, f"audit: {findings(cluster)}")
        restarted = sorted(p["id"] for p in cluster.processes() if p["restarts"])
    assert restarted == ["decode-1", "prefill-1"]
    write_record(
        "smollm2_chaos",
        {
            "streams": 64,
            "requests": len(outcomes),
            "cancelled": sum(o.cancelled for o in outcomes),
            "wrong_or_lost": 0,
            "killed": restarted,
            "audit_findings": 0,
        },
        note="2P + 2D, kill -9 of one worker of each role while 64 streams run; text equal to the single worker's",
    )
