"""What every `ChatFormat` promises, over the template of a model directory and over DeepSeek's formats."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from core.errors import BadRequest
from core.request import FinishReason
from gateway.generation import Delta
from gateway.text.chat import Chat, ChatFormat, ImagePart, TextRules
from gateway.text.tokenizer import Tokenizer
from tests.fakes.deepseek import EOS_TEXT, data_url, load_chat, picture, write_directory, write_trained
from tests.fakes.tokenizer import byte_level_definition, write_model_directory

KINDS = ("template", "deepseek-v4", "deepseek-v4.1", "v41-tiny")
USER = {"role": "user", "content": "Hello there"}
ANSWER = "Hello world, 你好 🌍 the end"


class Case:
    def __init__(self, directory, kind: str) -> None:
        directory.mkdir()
        if kind == "template":
            write_model_directory(directory, byte_level_definition())
        elif kind == "v41-tiny":
            write_directory(directory)
        else:
            write_trained(directory, tandem_format=kind)
        self.tokenizer: Tokenizer
        self.form: ChatFormat
        self.tokenizer, self.form = load_chat(directory)
        end = "<|im_end|>" if kind == "template" else EOS_TEXT
        self.eos = self.tokenizer.added_tokens[end]
        # Without reasoning, so that the answer is what is said.
        self.fields = {} if kind == "template" else {"thinking": False}

    def render(self, *messages, **fields):
        return self.form.render(Chat(messages=messages or (USER,), **self.fields, **fields))

    def said(self, text: str = ANSWER) -> list[int]:
        return [*self.tokenizer.encode_prompt(text, add_special_tokens=False), self.eos]


@pytest.fixture(scope="module", params=KINDS)
def case(request, tmp_path_factory):
    return Case(tmp_path_factory.mktemp("format") / request.param, request.param)


def pieces(reader, ids, chunk, finish=FinishReason.STOP):
    out = []
    for start in range(0, len(ids), chunk):
        part = tuple(ids[start : start + chunk])
        out.append(reader.push(Delta(token_ids=part, finish=finish if start + chunk >= len(ids) else None)))
        if out[-1].finish is not None:
            break
    return out


def test_the_same_chat_is_the_same_prompt(case):
    first = case.render().token_ids
    assert first
    assert case.render().token_ids == first
    assert case.render({"role": "user", "content": "Hello where"}).token_ids != first


def test_a_prompt_holds_the_users_text_and_a_part_is_as_good_as_a_string(case):
    parts = {"role": "user", "content": [{"type": "text", "text": "Hello there"}]}
    assert case.render(parts).token_ids == case.render().token_ids
    assert "Hello there" in case.tokenizer.decode(case.render().token_ids)


def test_special_spellings_of_a_user_are_text(case):
    plain = case.render({"role": "user", "content": "x"}).token_ids
    added = set(case.tokenizer.added_tokens.values())
    for spelling in case.tokenizer.added_tokens:
        ids = case.render({"role": "user", "content": f"x{spelling}"}).token_ids
        assert sum(token in added for token in ids) == sum(token in added for token in plain), spelling


def test_an_unknown_role_is_refused_by_its_place(case):
    with pytest.raises(BadRequest) as caught:
        case.render(USER, {"role": "wizard", "content": "x"})
    assert caught.value.param == "messages[1].role"


def test_every_usual_role_is_taken(case):
    for role in ("system", "developer", "user"):
        assert case.render({"role": role, "content": "x"}, USER).token_ids
    assert case.render(USER, {"role": "assistant", "content": "y"}, USER).token_ids


def test_an_image_is_placed_or_refused_by_its_place(case):
    part = ImagePart(data_url(picture(50, 50)), "auto", "messages[0].content[0].image_url")
    message = {"role": "user", "content": [{"type": "image", "image": 0}]}
    try:
        rendered = case.render(message, images=(part,))
    except BadRequest as refusal:
        assert refusal.param.startswith("messages[0].content[0]")
        assert "no images" in refusal.message
    else:
        (image,) = rendered.images
        assert len(set(rendered.token_ids[image.start : image.end])) == 1


@pytest.mark.parametrize("chunk", [1, 2, 5, 1000])
def test_an_answer_reads_the_same_in_any_pieces_and_its_end_says_nothing(case, chunk):
    ids = case.said()
    read = pieces(case.render().open_answer(TextRules(silent=frozenset({case.eos}))), ids, chunk)
    assert "".join(piece.text for piece in read) == ANSWER
    assert sum(piece.num_tokens for piece in read) == len(ids)
    assert [piece.ending for piece in read] == [None] * (len(read) - 1) + ["stop"]
    assert not any(piece.reasoning or piece.calls for piece in read)


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_a_stop_string_ends_the_answer_and_the_rest_is_surplus(case, chunk):
    ids = case.said()
    reader = case.render().open_answer(TextRules(stops=("🌍",), silent=frozenset({case.eos})))
    read = pieces(reader, ids, chunk, FinishReason.LENGTH)
    assert "".join(piece.text for piece in read) == "Hello world, 你好 "
    assert read[-1].ending == "stop"
    alone = pieces(case.render().open_answer(TextRules(stops=("🌍",))), ids, 1)
    assert sum(piece.num_tokens for piece in read) == sum(piece.num_tokens for piece in alone) < len(ids)
    if chunk == 1000:
        assert reader.num_surplus == len(ids) - read[-1].num_tokens


def test_a_length_is_told_as_such(case):
    read = pieces(case.render().open_answer(TextRules()), case.said()[:-1], 4, FinishReason.LENGTH)
    assert read[-1].ending == "length"


def test_samples_of_one_prompt_do_not_share_a_state(case):
    rendered = case.render()
    one, two = (rendered.open_answer(TextRules(silent=frozenset({case.eos}))) for _ in range(2))
    ids = case.said()
    texts = ["", ""]
    for start, token in enumerate(ids):
        for index, reader in enumerate((one, two)):
            last = FinishReason.STOP if start == len(ids) - 1 else None
            texts[index] += reader.push(Delta(token_ids=(token,), finish=last)).text
    assert texts == [ANSWER, ANSWER]


def test_chats_are_rendered_on_several_threads_at_once(case):
    chats = [{"role": "user", "content": f"{index} {'word ' * 50}"} for index in range(20)]
    alone = [case.render(chat).token_ids for chat in chats]
    with ThreadPoolExecutor(4) as threads:
        assert [rendered.token_ids for rendered in threads.map(case.render, chats)] == alone
