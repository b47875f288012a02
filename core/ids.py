"""Distinct types for everything that is named by a number or a string, and how fresh names are minted.

Knows nothing of what the ids stand for; a bare `str` or `int` never crosses a module boundary in their place.
"""

import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
"""One request of one client; minted by the gateway, never taken from a client."""
WorkerId = NewType("WorkerId", str)
"""Stable name of a worker process slot, e.g. ``decode-1``; survives a restart."""
Incarnation = NewType("Incarnation", str)
"""128 random bits as 32 hex digits, new at every process start."""
Handle = NewType("Handle", int)
"""u32 that names (request, attempt) on one gateway stream; never reused within a gateway incarnation."""
TransferId = NewType("TransferId", str)
"""One hand-over attempt; minted by the decode worker, see `transfer_id`."""
LeaseId = NewType("LeaseId", int)
"""u64 that names a prefill worker's promise that pages stay readable; unique within an incarnation."""
PageId = NewType("PageId", int)
"""Index of a page in a worker's pool; page 0 is the SINK."""
PageHash = NewType("PageHash", bytes)
"""32-byte chained content hash of one full page (`core.hashing`)."""
Row = NewType("Row", int)
"""Index of a sequence in the tables and rings of one engine."""
RegionId = NewType("RegionId", int)
"""Index of a registered memory region of one transport."""


def fresh_incarnation() -> Incarnation:
    """Return a new random 128-bit incarnation id."""
    return Incarnation(secrets.token_hex(16))


def fresh_request_id(prefix: str = "req") -> RequestId:
    """Return a new request id such as ``req-4f2c…`` (96 random bits)."""
    return RequestId(f"{prefix}-{secrets.token_hex(12)}")


def transfer_id(
    request_id: RequestId, attempt: int, source: Incarnation, target: Incarnation, number: int
) -> TransferId:
    """Name one hand-over: request, gateway attempt, both incarnations, and D's own counter for repeats."""
    return TransferId(f"{request_id}/{attempt}/{source}/{target}/{number}")
