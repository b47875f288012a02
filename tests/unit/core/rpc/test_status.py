"""Errors to status and back; every status has a meaning here."""

import grpc
import pytest
from grpc import aio

from core.errors import BY_CODE, ConfigError, DeadlineExceeded, NamespaceMismatch, TandemError, WorkerLost
from core.rpc.status import from_status, rebuild, refuse


class Context:
    """Records what `refuse` answered."""

    async def abort(self, code, details, trailing):
        self.answer = (code, details, dict(trailing))
        raise aio.AbortError


async def answered(error, status=None):
    context = Context()
    with pytest.raises(aio.AbortError):
        await refuse(context, error, status)
    return context.answer


@pytest.mark.parametrize("code", sorted(BY_CODE))
async def test_every_error_of_the_tree_comes_back_as_itself(code):
    error = BY_CODE[code]("ein Satz mit ü", param="feld.ü", retry_after_s=1.25)
    status, details, trailing = await answered(error)
    assert status is grpc.StatusCode[error.grpc_status]
    back = rebuild(status, details, trailing, "peer")
    assert (type(back), back.message, back.param, back.retry_after_s) == (
        type(error),
        error.message,
        "feld.ü",
        1.25,
    )


async def test_absent_facts_stay_absent():
    back = rebuild(*await answered(WorkerLost("gone")), "peer")
    assert (back.param, back.retry_after_s) == (None, None)


async def test_a_status_can_be_overridden_without_losing_the_code():
    status, details, trailing = await answered(ConfigError("no secret"), grpc.StatusCode.UNAUTHENTICATED)
    assert status is grpc.StatusCode.UNAUTHENTICATED
    assert isinstance(rebuild(status, details, trailing, "peer"), ConfigError)


async def test_a_long_message_is_cut_to_fit_the_header():
    _, details, _ = await answered(WorkerLost("x" * 10_000))
    assert len(details) == 2000


@pytest.mark.parametrize("status", list(grpc.StatusCode), ids=lambda status: status.name)
def test_a_status_without_our_code_is_mapped_by_what_it_means(status):
    expected = {
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
        grpc.StatusCode.UNAUTHENTICATED: ConfigError,
        grpc.StatusCode.PERMISSION_DENIED: ConfigError,
        grpc.StatusCode.UNIMPLEMENTED: NamespaceMismatch,
    }.get(status, WorkerLost)
    error = rebuild(status, "", {}, "decode worker 10.0.0.1:7")
    assert type(error) is expected
    assert "10.0.0.1:7" in error.message


def test_an_unknown_code_of_a_newer_peer_is_a_plain_error():
    error = rebuild(grpc.StatusCode.UNAVAILABLE, "new kind", {"tandem-code": "brand_new"}, "peer")
    assert type(error) is TandemError
    assert error.message == "new kind"


@pytest.mark.parametrize("text", ["soon", "nan", "inf", "-1"])
def test_a_malformed_retry_time_is_ignored(text):
    trailing = {"tandem-code": "no_capacity", "tandem-retry-after": text}
    assert rebuild(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", trailing, "peer").retry_after_s is None


def test_an_error_of_grpc_carries_its_trailing_metadata():
    raised = aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, aio.Metadata(), aio.Metadata(("tandem-code", "draining")), "going"
    )
    assert from_status(raised, "peer").code == "draining"
