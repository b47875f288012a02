"""`v41-tiny` through the cluster: P/D with drafts = one worker without, on shm (tcp: long), after a kill too (issue 3, point 5).

float64, so that only logic can differ. In exact mode every answer is compared, again and batched; in replay mode a
cached prefix changes the numbers by design, so each prompt is sent once to a cold cluster.
"""

import asyncio

import httpx
import pytest

from tests.fakes.audit import findings, statistics
from tests.fakes.killed_stream import stream_past_a_kill
from tests.fakes.live_cluster import complete, running_cluster, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PROMPTS = [
    "odd!!",
    "even",
    "The sea is never the same twice, said the keeper of the light, and went up the stairs again. ",
    "A prompt that is longer than the windows, so that replay has something to leave out. " * 4,
    "x" * 33,
]
SETTINGS = [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.95, "seed": 7}]
MAX_TOKENS = 17
EXACT = ("--set", "all:model.dtype=f64", "--set", "all:model.mode=exact")
REPLAY = ("--set", "all:model.dtype=f64")
PLAIN = ("--prefill", "0", "--prefill-mode", "local", "--set", "all:engine.speculation.mode=off")


def bodies():
    common = {"model": "v41-tiny", "max_tokens": MAX_TOKENS, "ignore_eos": True}
    asked = [*((p, SETTINGS[0]) for p in PROMPTS), *((p, SETTINGS[1]) for p in PROMPTS[1::2])]
    return [{**common, "prompt": p, **s} for p, s in asked]


def long_body():
    common = {"model": "v41-tiny", "max_tokens": 72, "ignore_eos": True}
    return {**common, "prompt": PROMPTS[2], "temperature": 0.8, "seed": 3}


def told(answer):
    assert "choices" in answer, answer
    return answer["choices"][0]["text"], answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]


def answers(cluster):
    return [told(complete(cluster.base_url, body)) for body in bodies()]


def answers_together(cluster):
    async def ask():
        async with httpx.AsyncClient(base_url=cluster.base_url, timeout=120) as client:
            return [r.json() for r in await asyncio.gather(*(client.post("/v1/completions", json=b) for b in bodies()))]

    return [told(answer) for answer in asyncio.run(ask())]


@pytest.fixture(scope="module")
def exact_truth(tmp_path_factory):
    with running_cluster(tmp_path_factory.mktemp("exact"), *PLAIN, *EXACT, model="v41-tiny") as cluster:
        return answers(cluster), complete(cluster.base_url, long_body())["choices"][0]["text"]


@pytest.fixture(scope="module")
def replay_truth(tmp_path_factory):
    """Each prompt once, without a prefix cache: what floors alone make of it."""
    flags = (*PLAIN, *REPLAY, "--set", "all:engine.prefix_cache=false")
    with running_cluster(tmp_path_factory.mktemp("replay"), *flags, model="v41-tiny") as cluster:
        return answers(cluster), complete(cluster.base_url, long_body())["choices"][0]["text"]


@pytest.mark.parametrize("transfer", ["shm", pytest.param("tcp", marks=pytest.mark.long)])
def test_exact_mode_with_drafts_over_the_cluster_is_one_plain_worker(exact_truth, transfer, tmp_path):
    expected, long_text = exact_truth
    flags = (*EXACT, "--transfer", transfer, "--decode", "2", "--set", "all:engine.audit_every_steps=1")
    with running_cluster(tmp_path, *flags, model="v41-tiny") as cluster:
        assert answers(cluster) == expected
        assert answers_together(cluster) == expected
        values = [s.values for w, s in statistics(cluster).items() if w.startswith("decode")]
        assert sum(v["transfer_bytes_pulled"] for v in values) > 0
        assert sum(v["engine_drafts_verified"] for v in values) > 0, "nothing was drafted"
        stream_past_a_kill(cluster, long_body(), long_text)
        wait_for(lambda: findings(cluster) == [], 60, f"audit: {findings(cluster)}")


def test_replay_mode_over_the_cluster_keeps_its_floors(replay_truth, tmp_path):
    expected, long_text = replay_truth
    settings = ("--set", "all:engine.prefix_cache=false", "--set", "all:engine.audit_every_steps=1")
    flags = (*REPLAY, "--decode", "2", *settings)
    with running_cluster(tmp_path, *flags, model="v41-tiny") as cluster:
        assert answers_together(cluster) == expected
        stream_past_a_kill(cluster, long_body(), long_text)
        wait_for(lambda: findings(cluster) == [], 60, f"audit: {findings(cluster)}")
