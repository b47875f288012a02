"""The frames between a worker and its sidecar: msgpack over one UNIX socket. One request in flight per number.

Records travel as the bytes of their three int64 arrays.
"""

from multiprocessing.connection import Connection

import msgspec
import numpy as np

from kv_transfer.api import Records
from kv_transfer.backends.native import EngineSpec, Outcome


class Mapped(msgspec.Struct, frozen=True, array_like=True):
    """A region as the child maps it: a range of a shared segment."""

    id: int
    segment: str
    offset: int
    nbytes: int


class Open(msgspec.Struct, frozen=True, tag="open"):
    """First frame: open the engine. Answered under number 0 with `Answer` of its export (empty if it serves nothing)."""

    spec: EngineSpec
    directory: str
    regions: tuple[Mapped, ...]


class Connect(msgspec.Struct, frozen=True, tag="connect"):
    """Connect to a peer; answered."""

    number: int
    blob: bytes
    timeout_s: float


class Disconnect(msgspec.Struct, frozen=True, tag="disconnect"):
    """Forget a peer; not answered."""

    peer: int


class Post(msgspec.Struct, frozen=True, tag="post"):
    """Start a read; answered by `Over` with the same number when it is over."""

    number: int
    peer: int
    source_region: int
    target_region: int
    source_offsets: bytes
    target_offsets: bytes
    nbytes: bytes


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """To `Open` and `Connect`: a value, or the code and text of an error."""

    number: int
    value: bytes | int = 0
    code: str = ""
    error: str = ""


class Over(msgspec.Struct, frozen=True, tag="over"):
    """A read is over."""

    number: int
    outcome: Outcome


ToChild = Open | Connect | Disconnect | Post
ToParent = Answer | Over
_to_child = msgspec.msgpack.Decoder(ToChild)
_to_parent = msgspec.msgpack.Decoder(ToParent)


def send(connection: Connection, frame: ToChild | ToParent) -> None:
    """Send one frame; raises OSError if the other side is gone."""
    connection.send_bytes(msgspec.msgpack.encode(frame))


def receive_request(connection: Connection) -> ToChild:
    """In the child; raises EOFError or OSError when the worker is gone."""
    return _to_child.decode(connection.recv_bytes())


def receive_reply(connection: Connection) -> ToParent:
    """In the worker; raises EOFError or OSError when the child is gone."""
    return _to_parent.decode(connection.recv_bytes())


def pack(number: int, peer: int, records: Records) -> Post:
    """Return the frame of a read."""
    columns = (records.source_offsets, records.target_offsets, records.nbytes)
    return Post(
        number, peer, records.source_region, records.target_region, *(c.astype(np.int64).tobytes() for c in columns)
    )


def unpack(post: Post) -> Records:
    """Return the records of a frame."""
    columns = (post.source_offsets, post.target_offsets, post.nbytes)
    return Records(post.source_region, post.target_region, *(np.frombuffer(c, np.int64) for c in columns))
