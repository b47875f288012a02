"""Grammars are compiled off everybody's way, once, within bounds, and refused with a reason."""

import asyncio
import json
import threading

import numpy as np
import pytest
from llguidance import LLMatcher

from core.errors import BadRequest, NoCapacity
from engine.config import GrammarConfig
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.vocabulary import mask_of
from engine.models.byte_tokenizer import write_byte_tokenizer

SIZE, EOS = 330, 258


@pytest.fixture(scope="module")
def definition(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder, SIZE)
    return json.loads((folder / "tokenizer.json").read_text())


@pytest.fixture
def make(definition):
    made = []

    def make(read=lambda: definition, **config):
        made.append(GrammarCompiler(read, GrammarConfig(**config), vocab_size=SIZE, stop_ids=(EOS,)))
        return made[-1]

    yield make
    for compiler in made:
        compiler.close()


def words(*texts):
    return "start: " + " | ".join(json.dumps(text) for text in texts)


async def test_a_grammar_is_compiled_once_and_every_sample_stands_alone(make):
    compiler = make()
    for _ in range(3):
        await compiler.ready(words("ab", "ac"))
    first, second = compiler.open(words("ab", "ac")), compiler.open(words("ab", "ac"))
    assert all(first.consume(token) for token in b"ab") and first.consume(EOS)
    assert second.consume(ord("a")) and not second.consume(ord("x"))
    assert "does not fit" in second.error
    assert compiler.statistics()["grammar_compiled"] == 1
    assert compiler.statistics()["grammar_requests"] == 3


async def test_free_text_needs_nothing(make):
    compiler = make()
    await compiler.ready("")
    assert compiler.statistics()["grammar_requests"] == 0


@pytest.mark.parametrize("grammar", ["start: nothing", '{"grammars": []}', "start: /(?=a)/", "{"])
async def test_a_wrong_grammar_is_the_requests_fault_every_time(make, grammar):
    compiler = make()
    for _ in range(2):
        with pytest.raises(BadRequest, match="refused"):
            await compiler.ready(grammar)
    assert compiler.statistics()["grammar_refused"] == 1


async def test_what_takes_too_long_is_refused_and_nobody_else_waits(definition, make):
    gate, begun = threading.Event(), threading.Event()
    compiler = make(compile_timeout_s=0.05, threads=2)
    whole = compiler._compile

    def slow(text):
        if "slow" in text:
            begun.set()
            gate.wait(30)
        return whole(text)

    compiler._compile = slow
    await compiler.ready(words("warm"))
    with pytest.raises(BadRequest, match="longer than"):
        await compiler.ready(words("slow"))
    assert begun.is_set()
    compiler.config = GrammarConfig(compile_timeout_s=30)
    await compiler.ready(words("fast"))
    gate.set()
    await compiler.ready(words("slow"))


async def test_only_so_many_wait(make):
    gate = threading.Event()
    compiler = make(threads=1, max_waiting=2)
    await compiler.ready(words("warm"))
    whole = compiler._compile
    compiler._compile = lambda text: gate.wait(30) and whole(text)
    waiting = [asyncio.create_task(compiler.ready(words(text))) for text in ("a", "b")]
    await asyncio.sleep(0)
    with pytest.raises(NoCapacity):
        await compiler.ready(words("c"))
    gate.set()
    await asyncio.gather(*waiting)
    await compiler.ready(words("c"))
    assert compiler.statistics()["grammar_waiting"] == 0


async def test_memory_is_bounded_by_number_and_by_size(make):
    by_number = make(cached=3)
    for i in range(9):
        await by_number.ready(words(f"n{i}"))
    assert by_number.statistics()["grammar_kept"] == 3
    by_size = make(cached_chars=1000)
    for i in range(9):
        await by_size.ready(words(f"{i}" * 300))
    assert by_size.statistics()["grammar_kept"] == 3
    # What was forgotten is compiled again, where it is needed.
    assert by_size.open(words("0" * 300)).consume(ord("0"))


@pytest.mark.parametrize(("read", "says"), [(lambda: None, "no tokenizer"), (lambda: {"model": {}}, "cannot be used")])
async def test_without_a_vocabulary_there_are_no_grammars(make, read, says):
    with pytest.raises(BadRequest, match=says):
        await make(read).ready(words("a"))


def test_a_mask_has_one_bit_per_id():
    mask = mask_of((0, 31, 32, 329), SIZE)
    assert mask.dtype == np.int32 and len(mask) == 11
    assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [0, 31, 32, 329]


def test_a_fork_does_not_move_what_it_came_from(make):
    compiler = make()
    rng = np.random.default_rng(1)
    grammar = LLMatcher.grammar_from_json_schema({"type": "array", "items": {"type": "integer"}, "maxItems": 6})
    for _ in range(20):
        constraint, tokens = compiler.open(grammar), []
        while len(tokens) < 40 and constraint.asks_matcher:
            fork = constraint.fork()
            for draft in rng.integers(0, SIZE, 4).tolist():
                if not fork.consume(draft):
                    break
            fresh = compiler.open(grammar)
            assert all(fresh.consume(token) for token in tokens)
            mask = constraint.matcher.compute_bitmask()
            assert mask == fresh.matcher.compute_bitmask()
            allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:SIZE])
            tokens.append(int(rng.choice(allowed)))
            assert constraint.consume(tokens[-1])
