"""The live requests of a decode worker, by handle and by sequence; the one place where a handle ends.

Turns engine events into deltas and records of gateway streams. Asyncio thread only; knows no transport and no gRPC.
"""

from collections import Counter
from collections.abc import Iterable

from core.errors import NoCapacity, TandemError
from core.ids import Handle
from core.request import FinishReason
from core.stream import Errored, Finished, Record, Started
from decode_worker.hosting import EngineDesk
from decode_worker.requests import Phase, Request
from decode_worker.streams import GatewayStream
from engine.events import FailedHere, FinishedHere, SeqId, StartedHere, StepEvents
from kv_transfer.api import FirstTokens, Pulled


class RequestLedger:
    """Tables of live requests. Every handle leaves through `end` or `give_up`, exactly once."""

    def __init__(self, desk: EngineDesk) -> None:
        self._desk = desk
        self._by_stream: dict[GatewayStream, dict[Handle, Request]] = {}
        self._by_seq: dict[SeqId, Request] = {}
        self._counts: Counter[str] = Counter()

    # In and out.

    def add(self, request: Request) -> bool:
        """Take a request in; False if its handle is live or was used: the first one stays untouched."""
        live = self._by_stream.setdefault(request.stream, {})
        if request.handle in live or request.stream.was_used(request.handle):
            self._counts["duplicate_submits"] += 1
            return False
        live[request.handle] = request
        self._counts["requests"] += 1
        return True

    def find(self, stream: GatewayStream, handle: Handle) -> Request | None:
        """Return a live request."""
        return self._by_stream.get(stream, {}).get(handle)

    def bind(self, request: Request, seq: SeqId) -> None:
        """Note which sequence works for a request; if it ended meanwhile, the sequence is aborted."""
        if request.has_ended:
            self._desk.abort(seq)
            return
        request.seq = seq
        self._by_seq[seq] = request

    def unbind(self, request: Request) -> None:
        """The request's sequence is gone or was given back."""
        if request.seq is not None:
            self._by_seq.pop(request.seq, None)
            request.seq = None

    def end(self, request: Request, record: Record) -> None:
        """Write the terminal record; a second one is dropped."""
        if self._close(request):
            request.stream.add_record(record)
            self._counts[f"ended_{record.reason if isinstance(record, Finished) else 'error'}"] += 1

    def fail(self, request: Request, error: TandemError) -> None:
        """End with an error, and give back whatever sequence is still bound."""
        if request.has_ended:
            return
        request.span.end(error=error.message)
        self._release(request)
        self.end(
            request,
            Errored(
                handle=request.handle,
                code=error.code,
                message=error.message,
                retry_after_s=error.retry_after_s or 0.0,
            ),
        )
        self._counts[f"error_{error.code}"] += 1

    def give_up(self, request: Request) -> None:
        """The gateway no longer wants it: no record, pending deltas dropped, engine and source told at once."""
        if request.has_ended:
            return
        request.span.end(error="given up by its gateway")
        self._release(request)
        self._close(request)
        request.stream.forget(request.handle)
        self._counts["aborted"] += 1

    def give_up_stream(self, stream: GatewayStream) -> None:
        """The gateway process is gone for good."""
        for request in tuple(self._by_stream.pop(stream, {}).values()):
            self.give_up(request)

    # What happens to them.

    def forward_first(self, request: Request, first: FirstTokens) -> None:
        """Send FINAL's tokens on at once; if they end the request, it is answered now."""
        position = request.num_output_tokens
        request.first = first
        request.span.note("first token")
        request.stream.add_record(self._started_record(request, first, 0))
        request.stream.add_tokens(request.handle, position, first.tokens, first.logprobs)
        self._counts["first_tokens_forwarded"] += 1
        if first.finish:
            self._counts["finished_by_first_token"] += 1
            self.end(
                request,
                Finished(
                    handle=request.handle,
                    reason=FinishReason(first.finish),
                    num_output_tokens=request.num_output_tokens,
                    recomputed_tokens=request.recomputed_tokens,
                ),
            )

    def landed(self, request: Request, pulled: Pulled) -> None:
        """The hand-over was validated: the request runs here now, unless its first token ended it."""
        self._counts["hand_overs"] += 1
        request.span.note("landed", {"bytes_pulled": pulled.bytes_pulled})
        if request.has_ended:
            return
        request.move(Phase.RUNNING)
        request.stream.add_record(self._started_record(request, pulled.first, pulled.bytes_pulled))

    def apply(self, events: StepEvents) -> None:
        """Send on what one pass of the engine produced: at most one frame per gateway stream follows from it."""
        for started in events.started:
            self._started(started)
        touched: set[GatewayStream] = set()
        by_seq, last = self._by_seq, None
        for seq, position, token in zip(
            events.seqs.tolist(), events.positions.tolist(), events.tokens.tolist(), strict=True
        ):
            request = by_seq.get(seq)
            if request is None:
                continue
            # A run of tokens of one sequence comes with the log-probabilities of all of them.
            logprobs = events.logprobs.get(seq, ()) if seq != last else ()
            last = seq
            request.stream.add_tokens(request.handle, position, (token,), logprobs)
            touched.add(request.stream)
        for finished in events.finished:
            self._finished(finished)
        for failed in events.failed:
            self._failed(failed)
        for stream in touched:
            stream.wakeup.set()
            self._shed(stream)
        self._counts["step_frames_due"] += len(touched)

    @property
    def num_live(self) -> int:
        """Requests without a terminal record."""
        return sum(len(live) for live in self._by_stream.values())

    @property
    def num_bound(self) -> int:
        """Sequences that work for a request, ended or not."""
        return len(self._by_seq)

    def live(self) -> Iterable[Request]:
        """Return a snapshot of the live requests."""
        return [request for requests in self._by_stream.values() for request in requests.values()]

    def count(self, name: str) -> None:
        """Count one occurrence of something."""
        self._counts[name] += 1

    def statistics(self) -> dict[str, float]:
        """Return counters and gauges by name."""
        phases = Counter(request.phase for request in self.live())
        return {
            **{f"{name}_total": float(value) for name, value in self._counts.items()},
            "requests_live": float(self.num_live),
            "sequences_bound": float(self.num_bound),
            **{f"requests_{phase}": float(phases[phase]) for phase in Phase if phase is not Phase.ENDED},
        }

    def _started_record(self, request: Request, first: FirstTokens, bytes_pulled: int) -> Started:
        return Started(
            handle=request.handle,
            num_cached_tokens=request.cached_tokens(first.num_cached_tokens),
            prefill_worker=request.target.worker_id if request.target else "",
            bytes_pulled=bytes_pulled,
            floors=first.floors,
        )

    def _started(self, event: StartedHere) -> None:
        request = self._by_seq.get(event.seq)
        if request is None or request.phase is not Phase.LOCAL:
            return
        request.move(Phase.RUNNING)
        if request.first is not None:
            # The client already has the first attempt's figures; this prompt was computed a second time.
            request.recomputed_tokens += len(request.continued().token_ids) - event.num_cached_tokens
            return
        request.stream.add_record(
            Started(
                handle=request.handle,
                num_cached_tokens=request.cached_tokens(event.num_cached_tokens),
                floors=event.floors,
            )
        )

    def _finished(self, event: FinishedHere) -> None:
        request = self._by_seq.pop(event.seq, None)
        if request is None:
            return
        request.seq = None
        self._counts["recomputed_tokens"] += event.recomputed_tokens + request.recomputed_tokens
        self.end(
            request,
            Finished(
                handle=request.handle,
                reason=event.reason,
                num_output_tokens=event.num_output_tokens,
                recomputed_tokens=event.recomputed_tokens + request.recomputed_tokens,
            ),
        )

    def _failed(self, event: FailedHere) -> None:
        request = self._by_seq.get(event.seq)
        if request is None:
            return
        if request.has_ended:
            self.unbind(request)  # its first token had ended it already
        self.fail(request, event.error)

    def _shed(self, stream: GatewayStream) -> None:
        live = self._by_stream.get(stream, {})
        while stream.overflows and live:
            newest = live[max(live)]
            stream.forget(newest.handle)
            self.fail(newest, NoCapacity("the gateway reads too slowly; this request was given up", retry_after_s=1.0))
            self._counts["shed_for_slow_gateway"] += 1

    def _release(self, request: Request) -> None:
        """Stop the hand-over; abort the sequence unless a pull owns it, which drops it itself when it is cancelled."""
        if request.task is not None:
            request.task.cancel()
        if request.seq is not None and request.phase is Phase.BOOKING:
            self._desk.give_back(request.seq)
        elif request.seq is not None and request.phase is not Phase.PULLING:
            self._desk.abort(request.seq)
        self.unbind(request)

    def _close(self, request: Request) -> bool:
        if request.has_ended:
            return False
        request.move(Phase.ENDED)
        self._by_stream.get(request.stream, {}).pop(request.handle, None)
        request.stream.remember_ended(request.handle)
        return True
