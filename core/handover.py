"""Messages of one hand-over between the destination's owner (D) and the source (P), as frozen structs.

`kv_transfer` speaks these over a `ControlLink`; `core.rpc.kv_source` carries them over gRPC. Every message names
the transfer; an unknown transfer is answered with `Gone`, a wrong incarnation with `Stale`; neither is an exception.
Times: `expires_in_s` is relative, on the sender's clock only; D never uses P's clock.
"""

import msgspec

from core.ids import Incarnation, LeaseId, TransferId
from core.kv import PageRef
from core.request import NO_FLOORS, Floors, GenerateRequest


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base: `transfer` is empty only for Hello, HelloReply, Heartbeat, HeartbeatReply and Stale."""

    transfer: TransferId = TransferId("")


# --- D to P ------------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True, tag=True):
    """First message of a link. P answers HelloReply or closes with NAMESPACE_MISMATCH."""

    incarnation: Incarnation
    expected: Incarnation | None = None
    """The P incarnation that D was told of; None accepts any."""
    fingerprint: bytes
    layout: bytes
    """`KVLayout.encode()` of D."""


class Prepare(Message, frozen=True, kw_only=True, tag=True):
    """Prefill this prompt and keep its pages under a lease. Idempotent: same transfer, same answer."""

    request: GenerateRequest
    prefix_tokens: int
    """Page-aligned tokens that D already holds; P announces them not."""
    lease_ttl_s: float
    digests: bool = False


class Release(Message, frozen=True, kw_only=True, tag=True):
    """All reads are terminal. P answers Released{valid} and unpins."""

    lease: LeaseId


class Abort(Message, frozen=True, kw_only=True, tag=True):
    """Stop and unpin. Frees P's resources earlier; D's safety never depends on the answer."""

    reason: str = ""


class Heartbeat(Message, frozen=True, kw_only=True, tag=True):
    """Renews the named leases: expiry becomes max(expiry, now + ttl)."""

    leases: tuple[LeaseId, ...]
    ttl_s: float


# --- P to D ------------------------------------------------------------------------------------------------------


class HelloReply(Message, frozen=True, kw_only=True, tag=True):
    """P's half of the handshake."""

    incarnation: Incarnation
    fingerprint: bytes
    layout: bytes
    exports: tuple[tuple[str, bytes], ...]
    """(transport name, opaque PeerInfo blob) in P's order of preference."""


class Accept(Message, frozen=True, kw_only=True, tag=True):
    """The lease is granted and the prompt is queued. `expires_in_s` restarts with each Heartbeat."""

    lease: LeaseId
    expires_in_s: float


class Reject(Message, frozen=True, kw_only=True, tag=True):
    """P takes it not; `code` is a `core.errors` code."""

    code: str
    message: str
    retry_after_s: float = 0.0


class ChunkReady(Message, frozen=True, kw_only=True, tag=True):
    """Pages of token range [start, end) are final. `pages` are P's pages for that range, from page start//page_tokens."""

    chunk: int
    start: int
    end: int
    pages: tuple[PageRef, ...]
    digests: tuple[int, ...] = ()
    """crc32 per page record, over components in layout order; empty if not asked for."""


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Natural-log probabilities at one output position; `top` is sorted, most likely first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Final(Message, frozen=True, kw_only=True, tag=True):
    """Prefill is over: the aux row. The remaining components are read like pages, from P's row `row`."""

    num_tokens: int
    """Tokens whose KV is in the pages: must equal what the chunks covered, and the request's length."""
    num_chunks: int
    first_tokens: tuple[int, ...]
    """What P sampled at position num_tokens (one token; more with speculation)."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0
    """Tokens that P found in its own cache: counted once, by P."""
    finish: str = ""
    """A FinishReason if the first token already ends the request: D answers without decoding."""
    row: int
    row_generation: int
    row_digests: tuple[int, ...] = ()
    floors: Floors = NO_FLOORS
    """What P computed with: D keeps them for a recomputation, and the gateway for a resume."""


class Failed(Message, frozen=True, kw_only=True, tag=True):
    """P could not finish this transfer's prefill."""

    code: str
    message: str
    retry_after_s: float = 0.0


class Released(Message, frozen=True, kw_only=True, tag=True):
    """Answer to Release. `valid`: the lease never lapsed and no epoch changed up to this moment."""

    valid: bool


class Aborted(Message, frozen=True, kw_only=True, tag=True):
    """Answer to Abort."""


class HeartbeatReply(Message, frozen=True, kw_only=True, tag=True):
    """Leases of the Heartbeat that P no longer holds."""

    lost: tuple[LeaseId, ...] = ()


class Gone(Message, frozen=True, kw_only=True, tag=True):
    """P does not know this transfer (ended, expired, or never seen)."""


class Stale(Message, frozen=True, kw_only=True, tag=True):
    """The message was meant for another incarnation; `incarnation` is the one that lives here now."""

    incarnation: Incarnation


FromD = Hello | Prepare | Release | Abort | Heartbeat
FromP = HelloReply | Accept | Reject | ChunkReady | Final | Failed | Released | Aborted | HeartbeatReply | Gone | Stale
