"""Reasoning told from the answer, however the text is cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.thinking import Stage, ThinkingMarks, ThinkingSplitter

CASES = [
    (Stage.BEFORE, "<think>\nHm, 好.\n</think>\n\nYes.", "Hm, 好.", "Yes."),
    (Stage.BEFORE, "\n <think>a</think>b", "a", "b"),
    (Stage.BEFORE, "Yes <think>no</think>", "", "Yes <think>no</think>"),
    (Stage.BEFORE, "<thin air>", "", "<thin air>"),
    (Stage.BEFORE, "<thi", "", "<thi"),
    (Stage.BEFORE, "  \n", "", "  \n"),
    (Stage.BEFORE, "<think></think>x", "", "x"),
    (Stage.REASONING, "\nHm </thin air> a\n</think>\nYes\n", "Hm </thin air> a", "Yes\n"),
    (Stage.REASONING, "never ends </thi", "never ends </thi", ""),
    (Stage.REASONING, "</think>x</think>", "", "x</think>"),
    (Stage.ANSWER, "<think>x</think>", "", "<think>x</think>"),
]


def split(stage: Stage, pieces: list[str]) -> tuple[str, str]:
    splitter = ThinkingSplitter(ThinkingMarks(), stage)
    told = [*(splitter.push(piece) for piece in pieces), splitter.finish()]
    return "".join(reasoning for reasoning, _ in told), "".join(answer for _, answer in told)


@pytest.mark.parametrize(("stage", "text", "reasoning", "answer"), CASES)
def test_reasoning_and_answer_are_told_apart(stage: Stage, text: str, reasoning: str, answer: str):
    assert split(stage, [text]) == (reasoning, answer)


WORDS = ["<think>", "</think>", "<", "/think>", "think>", " ", "\n", "a", "好", "<th", "ink>"]


@given(st.sampled_from(Stage), st.lists(st.sampled_from(WORDS), max_size=12), st.data())
@settings(deadline=None, max_examples=300)
def test_the_cut_does_not_matter(stage: Stage, words: list[str], data: st.DataObject):
    text = "".join(words)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(stage, pieces) == split(stage, [text])
