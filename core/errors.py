"""The one error tree, and its one mapping to gRPC status and HTTP code.

::

    TandemError
    ├── BadRequest            400  INVALID_ARGUMENT     the request is wrong; sending it again will not help
    │   ├── NeverFits         400  OUT_OF_RANGE         the prompt can never fit this deployment
    │   └── UnknownModel      404  NOT_FOUND
    ├── ConfigError           500  FAILED_PRECONDITION  a file or setting is wrong; the process refuses to start
    │   └── CheckpointError   500  DATA_LOSS            a model file is missing, truncated or of another shape
    ├── NoCapacity            429  RESOURCE_EXHAUSTED   retry after `retry_after_s`
    │   └── NoWorker          503  UNAVAILABLE          no worker of a role is ready
    ├── Draining              503  UNAVAILABLE          this process is going away; ask another
    ├── NamespaceMismatch     503  FAILED_PRECONDITION  peers of different fingerprint; the pair is refused
    │   └── LayoutMismatch    503  FAILED_PRECONDITION  the same model, but its KV cannot be read as ours
    ├── LeaseLost             503  ABORTED              the source's promise ended before the data was safe
    ├── TransferFailed        503  ABORTED              bytes did not arrive, or not the right ones
    │   └── ChecksumMismatch  503  DATA_LOSS
    ├── WorkerLost            502  UNAVAILABLE          the worker that owned the request is gone
    ├── DeadlineExceeded      504  DEADLINE_EXCEEDED
    ├── Aborted               499  CANCELLED            the client left, or an operator ended it
    ├── ContextExceeded       507  RESOURCE_EXHAUSTED   the sequence outgrew the whole pool; its output is kept
    └── InvariantError        500  INTERNAL             our own bug; the process dumps its state and stops

`retryable` says whether another worker may be asked for the same request.
"""

from typing import ClassVar


class TandemError(Exception):
    """Base of every error that may cross a process border. The message is one plain sentence."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class BadRequest(TandemError):
    """The request is wrong; `param` names the field."""

    code, http_status, grpc_status = "invalid_request", 400, "INVALID_ARGUMENT"


class NeverFits(BadRequest):
    """The prompt (or prompt + minimum output) can never fit this deployment."""

    code, http_status, grpc_status = "context_length_exceeded", 400, "OUT_OF_RANGE"


class UnknownModel(BadRequest):
    """No model of that name is served here."""

    code, http_status, grpc_status = "model_not_found", 404, "NOT_FOUND"


class ConfigError(TandemError):
    """A configuration file, flag or environment fact is wrong."""

    code, http_status, grpc_status = "config", 500, "FAILED_PRECONDITION"


class CheckpointError(ConfigError):
    """A model file is missing, truncated, corrupted or of another shape."""

    code, http_status, grpc_status = "checkpoint", 500, "DATA_LOSS"


class NoCapacity(TandemError):
    """Everything is busy; ask again after `retry_after_s`."""

    code, http_status, grpc_status, retryable = "no_capacity", 429, "RESOURCE_EXHAUSTED", True


class NoWorker(NoCapacity):
    """No ready worker of a needed role."""

    code, http_status, grpc_status, retryable = "no_worker", 503, "UNAVAILABLE", True


class Draining(TandemError):
    """This process takes no new work."""

    code, http_status, grpc_status, retryable = "draining", 503, "UNAVAILABLE", True


class NamespaceMismatch(TandemError):
    """Peers differ in model, epoch, layout or protocol; the pair is refused."""

    code, http_status, grpc_status, retryable = "namespace_mismatch", 503, "FAILED_PRECONDITION", True


class LayoutMismatch(NamespaceMismatch):
    """KV layouts differ where no plan can bridge it; the message names the path and both values."""

    code, http_status, grpc_status, retryable = "layout_mismatch", 503, "FAILED_PRECONDITION", True


class LeaseLost(TandemError):
    """The source's lease lapsed before the transfer was validated."""

    code, http_status, grpc_status, retryable = "lease_lost", 503, "ABORTED", True


class TransferFailed(TandemError):
    """The hand-over did not complete."""

    code, http_status, grpc_status, retryable = "transfer_failed", 503, "ABORTED", True


class ChecksumMismatch(TransferFailed):
    """Landed bytes differ from what the source announced."""

    code, http_status, grpc_status, retryable = "checksum_mismatch", 503, "DATA_LOSS", True


class WorkerLost(TandemError):
    """The worker that owned the request is gone and the request could not be resumed."""

    code, http_status, grpc_status, retryable = "worker_lost", 502, "UNAVAILABLE", True


class DeadlineExceeded(TandemError):
    """The request's deadline passed."""

    code, http_status, grpc_status = "deadline_exceeded", 504, "DEADLINE_EXCEEDED"


class Aborted(TandemError):
    """The client left, or an operator ended the request."""

    code, http_status, grpc_status = "aborted", 499, "CANCELLED"


class ContextExceeded(TandemError):
    """The sequence outgrew the whole page pool; output so far is kept."""

    code, http_status, grpc_status = "context_exceeds_capacity", 507, "RESOURCE_EXHAUSTED"


class InvariantError(TandemError):
    """Our own bug: a state that must never exist. Fatal for the process."""

    code, http_status, grpc_status = "invariant", 500, "INTERNAL"


def _tree(root: type[TandemError]) -> list[type[TandemError]]:
    return [root] + [leaf for child in root.__subclasses__() for leaf in _tree(child)]


BY_CODE: dict[str, type[TandemError]] = {kind.code: kind for kind in _tree(TandemError)}
"""Stable code -> class: how an error crosses the wire and is raised again on the other side."""


def from_code(code: str, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> TandemError:
    """Rebuild an error from its wire form; an unknown code becomes a plain `TandemError`."""
    return BY_CODE.get(code, TandemError)(message, param=param, retry_after_s=retry_after_s)
