import json

import pytest

from core import errors
from gateway.http.errors import HttpFault, anthropic_error, describe, openai_error


@pytest.mark.parametrize(
    ("error", "status", "code", "kind"),
    [
        (errors.BadRequest("m", param="p"), 400, "invalid_request", "invalid_request_error"),
        (errors.NeverFits("m"), 400, "context_length_exceeded", "invalid_request_error"),
        (errors.UnknownModel("m"), 404, "model_not_found", "invalid_request_error"),
        (errors.NoCapacity("m"), 429, "no_capacity", "rate_limit_error"),
        (errors.NoWorker("m"), 503, "no_worker", "server_error"),
        (errors.WorkerLost("m"), 502, "worker_lost", "server_error"),
        (errors.DeadlineExceeded("m"), 504, "deadline_exceeded", "server_error"),
        (errors.ContextExceeded("m"), 507, "context_exceeds_capacity", "server_error"),
        (HttpFault(413, "m", "body_too_large"), 413, "body_too_large", "invalid_request_error"),
    ],
)
def test_each_error_has_openais_shape_and_its_status(error: Exception, status: int, code: str, kind: str):
    fault = describe(error)
    assert fault.status == status
    param = getattr(error, "param", None)
    assert json.loads(openai_error(fault)) == {"error": {"message": "m", "type": kind, "param": param, "code": code}}


@pytest.mark.parametrize(("retry_after_s", "header"), [(None, b"1"), (0.2, b"1"), (2.1, b"3"), (7.0, b"7")])
def test_busy_answers_say_when_to_come_back_in_whole_seconds(retry_after_s: float | None, header: bytes):
    for kind in (errors.NoCapacity, errors.NoWorker):
        assert describe(kind("m", retry_after_s=retry_after_s)).headers == ((b"retry-after", header),)


def test_a_bug_shows_nothing_of_its_inside():
    fault = describe(KeyError("secret"))
    assert fault.status == 500
    assert b"secret" not in openai_error(fault) + anthropic_error(fault)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (404, "not_found_error"), (429, "rate_limit_error"), (413, "request_too_large")]
    + [(503, "overloaded_error"), (502, "api_error"), (504, "timeout_error"), (401, "authentication_error")],
)
def test_anthropics_shape_has_its_own_kinds(status: int, kind: str):
    body = json.loads(anthropic_error(HttpFault(status, "m", "c"), "msg-1"))
    assert body == {"type": "error", "error": {"type": kind, "message": "m"}, "request_id": "msg-1"}
