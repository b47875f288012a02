"""Streams to gateway processes: numbered frames, acknowledgements, replay after a broken connection, slow readers.

A stream belongs to a gateway incarnation and outlives its connections: while none is attached, deltas merge into one
pending frame, and frames without acknowledgement stay for replay. Nobody waits for a gateway: what it does not read
is merged, and past a bound its newest requests are given up. Asyncio thread only; knows no engine and no gRPC.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from core.clock import Clock
from core.errors import WorkerLost
from core.handover import TokenLogprobs
from core.ids import Handle, Incarnation
from core.stream import Logprobs, Record, StepFrame, StreamHello


class StreamConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of one gateway stream."""

    replay_s: Annotated[float, Meta(gt=0)] = 3.0
    """How long a gateway may stay away before its requests are aborted."""
    max_unacked_frames: Annotated[int, Meta(ge=1)] = 1024
    """Frames sent and kept for replay; when full, further deltas merge until an acknowledgement comes."""
    max_pending_tokens: Annotated[int, Meta(ge=1)] = 65536
    """Tokens merged for a slow or absent gateway before its newest requests are given up."""
    remembered_handles: Annotated[int, Meta(ge=1)] = 65536
    """Ended handles remembered, so that a repeated Submit does not run twice."""


class _Pending:
    """The frame in the making: deltas by handle in order of arrival, side records, log-probabilities."""

    def __init__(self) -> None:
        self.deltas: dict[Handle, tuple[int, list[int]]] = {}
        self.records: list[Record] = []
        self.logprobs: dict[Handle, list[TokenLogprobs]] = {}
        self.num_tokens = 0

    def __bool__(self) -> bool:
        return bool(self.deltas or self.records)

    def frame(self, sequence: int) -> StepFrame:
        tokens: list[int] = []
        for _, some in self.deltas.values():
            tokens += some
        side = tuple(Logprobs(handle=handle, items=tuple(items)) for handle, items in self.logprobs.items())
        return StepFrame(
            sequence=sequence,
            handles=list(self.deltas),
            positions=[position for position, _ in self.deltas.values()],
            counts=[len(some) for _, some in self.deltas.values()],
            tokens=tokens,
            records=(*side, *self.records),
        )


class Attachment:
    """One connection of a stream; a newer one supersedes it."""

    def __init__(self) -> None:
        self.superseded = asyncio.Event()


class GatewayStream:
    """Everything that one gateway incarnation has not acknowledged yet."""

    def __init__(self, gateway: Incarnation, config: StreamConfig) -> None:
        self.gateway = gateway
        self.wakeup = asyncio.Event()
        """Set when `next_frame` may have something."""
        self.detached_at: float | None = None
        self.frames_sent = 0
        self._config = config
        self._pending = _Pending()
        self._unacked: deque[StepFrame] = deque()
        self._last = 0
        self._acked = 0
        self._replay = 0
        self._attachment: Attachment | None = None
        self._ended: dict[Handle, None] = {}

    # A connection comes and goes.

    def attach(self) -> Attachment:
        """Bind a connection; an older one, if it still looks alive, is superseded."""
        if self._attachment is not None:
            self._attachment.superseded.set()
        self._attachment = Attachment()
        self.detached_at = None
        self.wakeup.set()
        return self._attachment

    def detach(self, attachment: Attachment, now: float) -> None:
        """The connection ended; the clock of `replay_s` starts unless a newer one took over."""
        if self._attachment is attachment:
            self._attachment = None
            self.detached_at = now

    def can_resume(self, after: int) -> bool:
        """True if every frame past `after` can still be sent."""
        return self._acked <= after <= self._last

    def rewind(self, after: int) -> None:
        """Acknowledge up to `after` and send what follows again."""
        self.acknowledge(after)
        self._replay = len(self._unacked)
        self.wakeup.set()

    def acknowledge(self, sequence: int) -> None:
        """Frames up to `sequence` arrived; numbers from the future or the past are ignored."""
        if not self._acked < sequence <= self._last:
            return
        while self._unacked and self._unacked[0].sequence <= sequence:
            self._unacked.popleft()
        self._acked = sequence
        self._replay = min(self._replay, len(self._unacked))
        self.wakeup.set()

    def next_frame(self) -> StepFrame | None:
        """Return the next frame to send, or None: nothing pending, or too much is unacknowledged."""
        if self._replay:
            frame = self._unacked[len(self._unacked) - self._replay]
            self._replay -= 1
        elif self._pending and len(self._unacked) < self._config.max_unacked_frames:
            self._last += 1
            frame = self._pending.frame(self._last)
            self._pending = _Pending()
            self._unacked.append(frame)
        else:
            return None
        self.frames_sent += 1
        return frame

    # Deltas come in.

    def add_tokens(
        self, handle: Handle, position: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()
    ) -> None:
        """Append output tokens; they follow without a gap on those added before. The caller sets `wakeup` once a step."""
        pending = self._pending
        delta = pending.deltas.get(handle)
        if delta is None:
            pending.deltas[handle] = (position, list(tokens))
        else:
            delta[1].extend(tokens)
        pending.num_tokens += len(tokens)
        if logprobs:
            pending.logprobs.setdefault(handle, []).extend(logprobs)

    def add_record(self, record: Record) -> None:
        """Append a side record and wake the writer."""
        self._pending.records.append(record)
        self.wakeup.set()

    def forget(self, handle: Handle) -> None:
        """Drop what is pending for an aborted handle: nobody wants it any more."""
        pending = self._pending
        _, tokens = pending.deltas.pop(handle, (0, ()))
        pending.num_tokens -= len(tokens)
        pending.logprobs.pop(handle, None)
        pending.records = [record for record in pending.records if record.handle != handle]

    def remember_ended(self, handle: Handle) -> None:
        """Keep a handle as used; the oldest are forgotten past the bound."""
        self._ended[handle] = None
        if len(self._ended) > self._config.remembered_handles:
            del self._ended[next(iter(self._ended))]

    def was_used(self, handle: Handle) -> bool:
        """True if the handle ended here already."""
        return handle in self._ended

    @property
    def overflows(self) -> bool:
        """True if more is pending than a slow gateway is granted."""
        return self._pending.num_tokens > self._config.max_pending_tokens

    @property
    def is_attached(self) -> bool:
        """True while a connection is bound."""
        return self._attachment is not None

    @property
    def is_flushed(self) -> bool:
        """True if everything was sent and acknowledged."""
        return not self._pending and not self._unacked

    @property
    def num_unacked(self) -> int:
        """Frames sent and not acknowledged."""
        return len(self._unacked)


class GatewayStreams:
    """All gateway streams of one worker, by gateway incarnation."""

    def __init__(self, worker: Incarnation, config: StreamConfig, clock: Clock) -> None:
        self._worker = worker
        self._config = config
        self._clock = clock
        self._streams: dict[Incarnation, GatewayStream] = {}
        self._frames_of_ended_streams = 0

    def open(self, hello: StreamHello) -> tuple[GatewayStream, GatewayStream | None]:
        """Return the stream for a connection, and the one that it replaces (its requests must be aborted).

        Raises `WorkerLost` if the gateway means another incarnation of this worker, or wants frames that are gone.
        """
        if hello.worker and hello.worker != self._worker:
            raise WorkerLost(f"this worker was restarted: incarnation {hello.worker} is gone")
        known = self._streams.get(hello.gateway)
        if hello.resume_after >= 0:
            if known is None or not known.can_resume(hello.resume_after):
                raise WorkerLost(f"frames after {hello.resume_after} of this stream are gone; start a fresh stream")
            known.rewind(hello.resume_after)
            return known, None
        stream = self._streams[hello.gateway] = GatewayStream(hello.gateway, self._config)
        if known is not None:
            self._frames_of_ended_streams += known.frames_sent
            known.attach()  # supersedes its connection
        return stream, known

    def detach(self, stream: GatewayStream, attachment: Attachment) -> None:
        """Note that a connection ended."""
        stream.detach(attachment, self._clock.now())

    def expire(self) -> list[GatewayStream]:
        """Remove and return the streams whose gateway stayed away longer than `replay_s`."""
        limit = self._clock.now() - self._config.replay_s
        gone = [s for s in self._streams.values() if s.detached_at is not None and s.detached_at <= limit]
        for stream in gone:
            del self._streams[stream.gateway]
            self._frames_of_ended_streams += stream.frames_sent
        return gone

    @property
    def is_flushed(self) -> bool:
        """True if every attached gateway has acknowledged everything."""
        return all(stream.is_flushed for stream in self._streams.values() if stream.is_attached)

    def statistics(self) -> dict[str, float]:
        """Return counters and gauges by name."""
        streams = self._streams.values()
        return {
            "gateway_streams": len(streams),
            "gateway_streams_attached": sum(stream.is_attached for stream in streams),
            "frames_sent": self._frames_of_ended_streams + sum(stream.frames_sent for stream in streams),
            "frames_unacked": sum(stream.num_unacked for stream in streams),
        }
