"""Public serving traces as one list of turns, and a small generated one for tests. Reads lengths, times and block ids.

Formats: Mooncake JSON lines (`conversation`, `synthetic`: open loop), sessions of an agentic generator (closed loop:
a turn comes a pause after the end of the one before), Azure's CSV (lengths only: no block ids). The files are not
part of this repository; a directory with them is given by flag.
"""

import csv
import itertools
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 512
SPREAD_MS = 3000
"""The conversation trace's times are multiples of this; requests of one instant are spread over it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request."""

    session: int
    at: float
    """Seconds: of arrival, or for later turns of a closed session the pause before it."""
    num_tokens: int
    """Prompt tokens, history included."""
    output_tokens: int
    blocks: tuple[int, ...]
    """Hashes of the prompt's blocks, the last one possibly partial; equal hash, equal whole prefix."""
    is_first: bool = True


@dataclass(frozen=True, slots=True)
class Trace:
    """Turns in order of arrival (open), or sessions one after another (closed)."""

    name: str
    turns: tuple[Turn, ...]
    closed: bool = False

    def faster(self, factor: float) -> "Trace":
        """Return it with arrivals (of sessions, if closed) `factor` times as fast; pauses inside a session stay."""
        turns = tuple(replace(turn, at=turn.at / factor) if turn.is_first else turn for turn in self.turns)
        return replace(self, name=f"{self.name} x{factor:g}", turns=turns)

    def superposed(self, copies: int, seed: int = 1) -> "Trace":
        """Return as many populations at once, each with blocks and sessions of its own, begun within a minute.

        How a rate is raised without squeezing the pauses inside anybody's session.
        """
        rng, sessions = random.Random(seed), 1 + max(turn.session for turn in self.turns)
        turns: list[Turn] = []
        for copy in range(copies):
            shift, salt = rng.random() * 60.0, rng.getrandbits(63)
            for turn in self.turns:
                blocks = tuple(block ^ salt for block in turn.blocks)
                at = turn.at + shift if turn.is_first else turn.at
                turns.append(replace(turn, session=turn.session + copy * sessions, at=at, blocks=blocks))
        if not self.closed:
            turns.sort(key=lambda turn: turn.at)
        return replace(self, name=f"{copies} x {self.name}", turns=tuple(turns))


def hashed(block: int) -> int:
    """Signed 64-bit hash of a block id (splitmix64): ids of traces are counters, the index expects hashes."""
    mixed = (block + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) - (1 << 63)


def mooncake(path: Path, seed: int = 1) -> Trace:
    """Load JSON lines of timestamp [ms], input_length, output_length, hash_ids."""
    rng = random.Random(seed)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    coarse = len({row["timestamp"] for row in rows}) < len(rows) / 2
    turns = [
        Turn(
            session=number,
            at=(row["timestamp"] + (rng.random() * SPREAD_MS if coarse else 0.0)) / 1000.0,
            num_tokens=row["input_length"],
            output_tokens=row["output_length"],
            blocks=tuple(map(hashed, row["hash_ids"])),
        )
        for number, row in enumerate(rows)
    ]
    return Trace(path.stem.removesuffix("_trace"), tuple(sorted(turns, key=lambda turn: turn.at)))


def agentic(path: Path, *, sessions: int = 300, gap_s: float = 3.0, seed: int = 1) -> Trace:
    """Load the first `sessions` of a file of per-turn deltas; sessions start `gap_s` apart on average (Poisson).

    The file starts them all at once. A turn's prompt is all earlier prompts and answers and its own delta.
    """
    rng, grouped = random.Random(seed), dict[str, list[dict[str, Any]]]()
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["session_id"] in grouped or len(grouped) < sessions:
            grouped.setdefault(row["session_id"], []).append(row)
    turns, start = [], 0.0
    for number, rows in enumerate(grouped.values()):
        start += rng.expovariate(1 / gap_s)
        turns += _session_turns(number, start, rows)
    return Trace("agentic", tuple(turns), closed=True)


def _session_turns(number: int, start: float, rows: Iterable[dict[str, Any]]) -> list[Turn]:
    """A prompt's full blocks: of the first turn those that the file names, as sessions share them; then the session's own."""
    turns: list[Turn] = []
    tokens, blocks = 0, ()
    for row in rows:
        tokens += row["input_length"]
        full = tokens // BLOCK_TOKENS
        if not turns:
            blocks = tuple(map(hashed, row["hash_ids"][:full]))
        blocks += tuple(hashed((number + 1 << 32) + block) for block in range(len(blocks), full))
        at = row.get("delay", 0.0) / 1000.0 if turns else start
        turns.append(Turn(number, at, tokens, row["output_length"], blocks, is_first=not turns))
        tokens += row["output_length"]
    return turns


def azure(path: Path) -> Trace:
    """Load Azure's TIMESTAMP, ContextTokens, GeneratedTokens; every prompt is new (there are no block ids)."""
    fresh = itertools.count(1)
    turns, first = [], None
    with path.open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file)):
            moment = datetime.fromisoformat(row["TIMESTAMP"][:26])
            first = first or moment
            tokens = max(1, int(row["ContextTokens"]))
            blocks = tuple(hashed(next(fresh)) for _ in range(-(-tokens // BLOCK_TOKENS)))
            at = (moment - first).total_seconds()
            turns.append(Turn(number, at, tokens, int(row["GeneratedTokens"]), blocks))
    return Trace(path.stem.removeprefix("AzureLLMInferenceTrace_"), tuple(sorted(turns, key=lambda turn: turn.at)))


def generated(count: int = 300, seed: int = 7, gap_s: float = 0.35) -> Trace:
    """Return conversations over a few system prompts: the trace of the regression test, made of nothing public."""
    rng, fresh = random.Random(seed), itertools.count(10**6)
    systems = [tuple(hashed(next(fresh)) for _ in range(rng.randrange(1, 9))) for _ in range(5)]
    live: list[tuple[int, tuple[int, ...]]] = []
    turns: list[Turn] = []
    at = 0.0
    for number in range(count):
        at += rng.expovariate(1 / gap_s)
        if live and rng.random() < 0.5:
            session, blocks = live.pop(rng.randrange(len(live)))
        else:
            session, blocks = number, systems[min(rng.randrange(5), rng.randrange(5))]
        blocks += tuple(hashed(next(fresh)) for _ in range(max(1, min(120, int(rng.lognormvariate(2.0, 1.0))))))
        live.append((session, blocks))
        turns.append(Turn(session, at, len(blocks) * BLOCK_TOKENS - rng.randrange(512), rng.randrange(20, 500), blocks))
    return Trace("generated", tuple(turns))


LOADERS: dict[str, tuple[str, Callable[[Path], Trace]]] = {
    "conversation": ("conversation_trace.jsonl", mooncake),
    "synthetic": ("synthetic_trace.jsonl", mooncake),
    "agentic": ("aiperf_agentic_code_1000s_seed42.jsonl", agentic),
    "azure_code": ("AzureLLMInferenceTrace_code.csv", azure),
    "azure_conv": ("AzureLLMInferenceTrace_conv.csv", azure),
}


def load(name: str, directory: Path) -> Trace:
    """Load one of the known traces from a directory."""
    file, loader = LOADERS[name]
    return loader(directory / file)
