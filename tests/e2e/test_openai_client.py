"""The official `openai` client against a whole cluster (issue point 4)."""

import openai
import pytest

from tests.fakes.audit import held_pages
from tests.fakes.live_cluster import running_cluster, wait_for
from tests.fakes.truth import scripted_text

pytestmark = [pytest.mark.cluster]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running_cluster(tmp_path_factory.mktemp("openai"), "--set", "all:engine.audit_every_steps=1") as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster):
    with openai.OpenAI(base_url=cluster.base_url + "/v1", api_key="none", max_retries=0, timeout=30) as made:
        yield made


def chat(client, **more):
    messages = [{"role": "user", "content": "Say hello."}]
    return client.chat.completions.create(model="scripted", messages=messages, temperature=0, **more)


def test_models_are_listed(client):
    assert [m.id for m in client.models.list()] == ["scripted"]


def test_chat_answers_with_usage(client):
    answer = chat(client)
    assert answer.choices[0].message.content == "Hello from the scripted model."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens == len("Hello from the scripted model.") + 1


def test_chat_streams_the_same_text_and_usage_comes_last(client):
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Hello from the scripted model."
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(text) + 1


def test_multi_byte_text_arrives_whole(client):
    messages = [{"role": "user", "content": "Say hello in five languages."}]
    stream = client.chat.completions.create(model="scripted", messages=messages, temperature=0, stream=True)
    pieces = [c.choices[0].delta.content or "" for c in stream if c.choices]
    assert "".join(pieces) == "Hello, 你好, Привет, مرحبا, Γειά 🙂"
    assert not any("\ufffd" in piece for piece in pieces)


def test_completions_stream_and_whole_agree_with_the_truth(client):
    expected = scripted_text("Once upon a time", 40)
    whole = client.completions.create(model="scripted", prompt="Once upon a time", max_tokens=40, temperature=0)
    stream = client.completions.create(
        model="scripted", prompt="Once upon a time", max_tokens=40, temperature=0, stream=True
    )
    assert whole.choices[0].text == expected
    assert "".join(c.choices[0].text for c in stream if c.choices) == expected


def test_logprobs_are_aligned_with_tokens(client):
    answer = chat(client, logprobs=True, top_logprobs=2, max_tokens=5)
    content = answer.choices[0].logprobs.content
    assert [t.token for t in content] == list("Hello")
    assert all(t.logprob <= 0 and len(t.top_logprobs) == 2 and t.top_logprobs[0].token == t.token for t in content)


def test_a_stop_string_ends_the_text_before_it(client):
    answer = chat(client, stop=["scripted"])
    assert answer.choices[0].message.content == "Hello from the "
    assert answer.choices[0].finish_reason == "stop"


def test_two_choices_are_both_complete(client):
    answer = chat(client, n=2)
    assert [c.message.content for c in answer.choices] == ["Hello from the scripted model."] * 2
    assert [c.index for c in answer.choices] == [0, 1]


def test_sampled_choices_of_one_seed_differ_and_repeat(client):
    def ask():
        messages = [{"role": "user", "content": "Anything."}]
        answer = client.chat.completions.create(
            model="scripted", messages=messages, temperature=1.5, seed=11, n=2, max_tokens=24
        )
        return [c.message.content for c in answer.choices]

    first = ask()
    assert first == ask()


def test_a_wrong_type_is_a_bad_request_that_names_the_field(client):
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, extra_body={"max_tokens": "many"})
    assert error.value.param == "max_tokens"


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "hi"}])


def test_a_client_that_leaves_frees_its_pages(cluster, client):
    body = {"ignore_eos": True}
    stream = client.completions.create(
        model="scripted", prompt="leave me", max_tokens=3000, stream=True, extra_body=body
    )
    next(iter(stream))
    assert held_pages(cluster) > 0
    stream.close()
    wait_for(lambda: held_pages(cluster) == 0, 60, "pages are still held")
