"""Routes, limits, headers and errors of the application."""

import json

import httpx
import pytest

from gateway.generation import Delta
from gateway.text.tokenizer import Tokenizer
from tests.fakes.asgi import Call, post
from tests.fakes.generator import ScriptedGenerator
from tests.fakes.http_api import BODY, CHAT, Serve, call_api, speaker


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "unknown_route"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ],
)
async def test_wrong_routes_and_methods_answer_in_openais_shape(
    tokenizer: Tokenizer, method: str, path: str, status: int, code: str
):
    call = await call_api(tokenizer, speaker(tokenizer), Call(path, method=method))
    assert (call.status, call.json["error"]["code"]) == (status, code)
    assert (b"allow" in call.response_headers) == (status == 405)


async def test_probes_models_and_metrics_answer(serve: Serve, tokenizer: Tokenizer):
    generator = speaker(tokenizer)
    async with serve(generator) as served:
        for path in ("/health", "/livez", "/readyz"):
            assert (await served.http.get(path)).status_code == 200
        assert (await served.http.head("/metrics")).status_code == 200
        models = (await served.http.get("/v1/models")).json()
        assert models["data"][0] == {
            "id": "tiny",
            "object": "model",
            "created": 0,
            "owned_by": "tandem",
            "max_model_len": 4096,
        }
        await served.openai.chat.completions.create(**BODY)
        metrics = (await served.http.get("/metrics")).text
        assert 'tandem_http_requests_total{route="/v1/chat/completions",status="200"} 1.0' in metrics
        assert "tandem_http_open_requests 0.0" in metrics
        generator.served = ()
        assert (await served.http.get("/readyz")).status_code == 503
        assert (await served.http.get("/health")).status_code == 200


@pytest.mark.parametrize("content_type", [b"text/plain", b"application/x-www-form-urlencoded"])
async def test_other_media_types_are_refused(tokenizer: Tokenizer, content_type: bytes):
    call = Call(CHAT, json.dumps(BODY).encode(), headers=[(b"content-type", content_type)])
    assert (await call_api(tokenizer, speaker(tokenizer), call)).status == 415


async def test_a_body_over_the_limit_is_refused_whether_announced_or_not(tokenizer: Tokenizer):
    limits = {"max_body_bytes": 2048}
    announced = Call(CHAT, b"x", headers=[(b"content-length", b"2049")])
    chunked = Call(CHAT, parts=[b"x" * 1500, b"x" * 1500, b"x"])
    for call in (announced, chunked):
        await call_api(tokenizer, speaker(tokenizer), call, **limits)
        assert (call.status, call.json["error"]["code"]) == (413, "body_too_large")
        assert call.response_headers[b"connection"] == b"close"


async def test_a_body_in_parts_is_put_together(tokenizer: Tokenizer):
    raw = json.dumps(BODY).encode()
    call = Call(CHAT, parts=[raw[:10], b"", raw[10:]])
    assert (await call_api(tokenizer, speaker(tokenizer), call)).status == 200


async def test_a_body_that_does_not_come_times_out(tokenizer: Tokenizer):
    call = Call(CHAT, parts=[b"{", None])
    assert (await call_api(tokenizer, speaker(tokenizer), call, body_timeout_s=0.02)).status == 408


async def test_the_clients_request_id_is_echoed_and_a_bad_one_replaced(tokenizer: Tokenizer):
    good = await call_api(tokenizer, speaker(tokenizer), post(CHAT, BODY, (b"x-request-id", b"mine-1")))
    assert good.response_headers[b"x-request-id"] == b"mine-1"
    bad = await call_api(tokenizer, speaker(tokenizer), post(CHAT, BODY, (b"x-request-id", b"a b")))
    assert bad.response_headers[b"x-request-id"].decode() == bad.json["id"]
    refused = await call_api(tokenizer, speaker(tokenizer), post(CHAT, {}, (b"x-request-id", b"mine-2")))
    assert (refused.status, refused.response_headers[b"x-request-id"]) == (400, b"mine-2")


async def test_a_whole_answer_says_where_its_time_went(tokenizer: Tokenizer):
    call = await call_api(tokenizer, speaker(tokenizer), post(CHAT, BODY))
    timing = call.response_headers[b"server-timing"].decode()
    assert [part.split(";")[0].strip() for part in timing.split(",")] == ["tok", "ttft", "total"]


async def test_a_bug_answers_500_without_its_inside_and_is_logged(tokenizer: Tokenizer, caplog):
    call = await call_api(tokenizer, ScriptedGenerator(lambda _: [KeyError("secret")]), post(CHAT, BODY))
    assert call.status == 500
    assert b"secret" not in call.text
    assert "secret" in caplog.text


async def test_a_generator_that_ends_without_a_finish_is_an_error_not_an_answer(tokenizer: Tokenizer):
    generator = ScriptedGenerator(lambda _: [Delta(token_ids=(70,))])
    assert (await call_api(tokenizer, generator, post(CHAT, BODY))).status == 500
    streamed = await call_api(tokenizer, generator, post(CHAT, {**BODY, "stream": True}))
    assert b"[DONE]" not in streamed.text
    assert b'data: {"error"' in streamed.text


async def test_keep_alive_serves_many_requests_on_one_connection(serve: Serve, tokenizer: Tokenizer):
    async with serve(speaker(tokenizer)) as served:
        limits = httpx.Limits(max_connections=1)
        async with httpx.AsyncClient(base_url=served.url, limits=limits, trust_env=False) as client:
            for number in range(4):
                answer = await client.post(CHAT, json={**BODY, "stream": bool(number % 2)})
                assert answer.status_code == 200
                assert "connection" not in answer.headers
