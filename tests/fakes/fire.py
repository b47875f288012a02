"""Load on a simulated cluster while its workers are killed, stopped, made to refuse, and started anew."""

import asyncio
import random
import signal
from collections import Counter
from dataclasses import dataclass, field

import httpx

from tests.fakes.sim_cluster import body, stream

STEP_S = 0.02
REFUSALS = 8
HARMS = ("kill decode", "stop decode", "kill prefill", "refuse decode")


@dataclass
class Answer:
    """Everything that one client saw."""

    prompt: tuple
    max_tokens: int
    text: str = ""
    finishes: list = field(default_factory=list)
    ends: list = field(default_factory=list)
    """Terminal events: ``[DONE]``, an error, or ``closed``."""
    usage: dict | None = None


def faults(answer: Answer, truth: str) -> list[str]:
    """Say what is wrong with an answer that must be whole."""
    found = []
    if answer.text != truth:
        kind = "lost or wrong tokens" if len(answer.text) <= len(truth) else "tokens twice"
        found.append(f"{kind}: {answer.text[:80]!r} instead of {truth[:80]!r}")
    if answer.ends != ["[DONE]"]:
        found.append(f"ended with {answer.ends}")
    if answer.finishes != ["length"]:
        found.append(f"finish reasons {answer.finishes}")
    if answer.usage is None or answer.usage["completion_tokens"] != answer.max_tokens:
        found.append(f"usage {answer.usage}")
    return found


async def ask(client: httpx.AsyncClient, url: str, prompt: tuple, max_tokens: int) -> Answer:
    """Read one stream to its very end, also behind its first terminal event."""
    answer = Answer(prompt, max_tokens)
    async for event in stream(client, url, body(prompt, max_tokens=max_tokens)):
        if isinstance(event, str):
            answer.ends.append(event)
        elif "error" in event:
            answer.ends.append(event["error"]["code"])
        else:
            answer.usage = event.get("usage") or answer.usage
            for choice in event["choices"]:
                answer.text += choice["text"]
                answer.finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
    if answer.ends == ["worker_lost", "closed"]:
        answer.ends = ["worker_lost"]
    return answer


async def harm(cluster, rng: random.Random, deeds: Counter) -> None:
    """Do one thing to one worker and bring it back; the cluster has others."""
    deed = HARMS[sum(deeds.values()) % len(HARMS)]
    deeds[deed] += 1
    name = rng.choice(("p1", "p2")) if "prefill" in deed else rng.choice(("d1", "d2", "d3"))
    child = cluster.children[name]
    if deed == "stop decode":
        child.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(rng.uniform(0.5, 4.0))
        child.process.send_signal(signal.SIGCONT)
    else:
        await child.kill(signal.SIGKILL)
        # Under the same name it is another incarnation.
        plan = {"plan": "error:no_capacity", "plan_requests": REFUSALS} if deed == "refuse decode" else {}
        await cluster.start_workers(name, step_s=STEP_S, **plan)
    await cluster.routable(name)


async def burn(cluster, *, streams: int, num_harms: int, seed: int) -> tuple[list[Answer], Counter]:
    """Keep `streams` clients busy until that many harms were done; return all answers and what was done."""
    rng, deeds, answers, stop = random.Random(seed), Counter(), [], asyncio.Event()

    async def one(client, number):
        turn = 0
        while not stop.is_set() or not turn:
            prompt = (number + 3, 20 + turn % 50, 60)
            answers.append(await ask(client, cluster.url, prompt, rng.randrange(20, 80)))
            turn += 1

    limits = httpx.Limits(max_connections=streams, max_keepalive_connections=streams)
    async with httpx.AsyncClient(timeout=90, trust_env=False, limits=limits) as client:
        tasks = [asyncio.create_task(one(client, number)) for number in range(streams)]
        await asyncio.sleep(0.5)
        for _ in range(num_harms):
            await harm(cluster, rng, deeds)
        stop.set()
        await asyncio.gather(*tasks)
    return answers, deeds
