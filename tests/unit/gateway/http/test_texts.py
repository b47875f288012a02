"""Tokenizing, detokenizing, counting; and what this server has no model for."""

import pytest

from gateway.text.chat import ChatFormat
from gateway.text.tokenizer import Tokenizer
from tests.fakes.asgi import Call, post
from tests.fakes.deepseek import EOS, SERVED, WEATHER, load_chat, spell, write_directory
from tests.fakes.generator import ScriptedGenerator, obedient
from tests.fakes.http_api import CHAT, call_api, speaker
from tests.fakes.http_api import MESSAGES as HELLO
from tests.fakes.streams import MESSAGES, body_of, tools_of


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[Tokenizer, ChatFormat]:
    return load_chat(write_directory(tmp_path_factory.mktemp("tiny")))


async def test_a_prompt_becomes_tokens_and_text_again(tokenizer: Tokenizer):
    text = "Hello, 你好 🌍"
    for prefix in ("", "/v1"):
        told = await call_api(tokenizer, speaker(tokenizer), post(f"{prefix}/tokenize", {"prompt": text}))
        assert told.json["tokens"] == list(tokenizer.encode_prompt(text))
        assert (told.json["count"], told.json["max_model_len"]) == (len(told.json["tokens"]), 4096)
        assert told.json["token_strs"] is None
        body = {"model": "tiny", "tokens": told.json["tokens"]}
        back = await call_api(tokenizer, speaker(tokenizer), post(f"{prefix}/detokenize", body))
        assert back.json == {"prompt": text}


async def test_a_chat_becomes_the_tokens_that_the_cluster_would_get(tiny):
    tokenizer, form = tiny
    generator = ScriptedGenerator(obedient([EOS], eos=(EOS,)), models=(SERVED,))
    payload = {"model": "tiny", "messages": HELLO, "tools": [WEATHER]}
    told = await call_api(tokenizer, generator, post("/tokenize", {**payload, "return_token_strs": True}), form)
    assert generator.prompts == []
    await call_api(tokenizer, generator, post(CHAT, payload), form)
    assert told.json["tokens"] == list(generator.prompts[0].token_ids)
    assert "".join(told.json["token_strs"]) == tokenizer.decode(told.json["tokens"], skip_special=False)


async def test_counted_tokens_are_those_of_the_message(tiny):
    tokenizer, form = tiny
    generator = ScriptedGenerator(obedient([*spell(tokenizer, "x"), EOS], eos=(EOS,)), models=(SERVED,))
    payload = body_of(MESSAGES, system="Be brief.", **tools_of(MESSAGES, WEATHER))
    message = await call_api(tokenizer, generator, post(MESSAGES, payload), form)
    del payload["max_tokens"]
    counted = await call_api(tokenizer, generator, post(f"{MESSAGES}/count_tokens", payload), form)
    assert counted.json == {"input_tokens": message.json["usage"]["input_tokens"]}


@pytest.mark.parametrize(
    ("path", "payload", "param"),
    [
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"model": "tiny"}, "prompt"),
        ("/detokenize", {"tokens": [400]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/v1/embeddings", {"model": "tiny", "input": "x"}, "model"),
    ],
)
async def test_wrong_bodies_name_their_field(tokenizer: Tokenizer, path: str, payload: dict, param: str):
    call = await call_api(tokenizer, speaker(tokenizer), post(path, payload))
    assert (call.status, call.json["error"]["param"]) == (400, param)


async def test_embeddings_say_that_the_model_makes_none(tokenizer: Tokenizer):
    call = await call_api(tokenizer, speaker(tokenizer), post("/v1/embeddings", {"model": "tiny", "input": "x"}))
    assert "embeddings are not supported by the model `tiny`" in call.json["error"]["message"]


async def test_one_model_can_be_asked_for(tokenizer: Tokenizer):
    call = await call_api(tokenizer, speaker(tokenizer), Call("/v1/models/tiny", method="GET"))
    assert (call.status, call.json["id"], call.json["max_model_len"]) == (200, "tiny", 4096)
    assert (await call_api(tokenizer, speaker(tokenizer), Call("/v1/models/huge", method="GET"))).status == 404


@pytest.mark.parametrize(
    ("headers", "session", "priority"),
    [
        ([(b"x-session-id", b"s1")], "s1", 0),
        ([(b"x-correlation-id", b"s2"), (b"x-priority", b"-5")], "s2", -5),
        ([(b"x-session-affinity", b"s3"), (b"x-session-id", b"s1")], "s3", 0),
    ],
)
async def test_headers_name_session_and_priority(tokenizer: Tokenizer, headers, session: str, priority: int):
    generator = speaker(tokenizer)
    await call_api(tokenizer, generator, post(CHAT, {"model": "tiny", "messages": HELLO}, *headers))
    (prompt,) = generator.prompts
    assert (prompt.session, prompt.priority) == (session, priority)


async def test_a_wrong_priority_is_refused_and_the_bodys_own_wins(tokenizer: Tokenizer):
    body = {"model": "tiny", "messages": HELLO, "priority": 3}
    assert (await call_api(tokenizer, speaker(tokenizer), post(CHAT, body, (b"x-priority", b"high")))).status == 400
    generator = speaker(tokenizer)
    await call_api(tokenizer, generator, post(CHAT, body, (b"x-priority", b"9")))
    assert generator.prompts[0].priority == 3
