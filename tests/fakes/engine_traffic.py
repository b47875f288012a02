"""Random traffic for an engine on `KvRunner`: local prompts, sources, hand-overs with a slow or stale remote writer.

Every text is compared with `reply`, announced pages are read the moment they are announced and again at release, and
pages of a dropped hand-over are scribbled over until they are proven: memory handed out too early changes a text.
"""

import random

import numpy as np

from core.errors import TandemError
from core.request import FinishReason
from tests.fakes.engine_rig import EOS, request_of
from tests.fakes.kv_runner import reply

FAR = 1e9


class Traffic:
    """Drives a rig with a seeded generator; `step` does one random thing and one pass."""

    def __init__(
        self,
        rig,
        seed,
        *,
        kinds=("local", "source", "handover"),
        longest=40,
        max_outputs=24,
        abort_rate=0.05,
        ask_rate=0.5,
    ):
        self.rig, self.random = rig, random.Random(seed)
        self.kinds, self.longest, self.max_outputs, self.abort_rate = kinds, longest, max_outputs, abort_rate
        self.ask_rate = ask_rate
        self.local, self.sources, self.handovers = {}, {}, {}
        self.stale = []
        self.aborted = set()
        self.refused = 0
        self.count = 0
        self._stems = [[self.random.randrange(90) for _ in range(longest)] for _ in range(3)]

    # What is asked.

    def prompt(self):
        stem = self.random.choice(self._stems)
        shared = self.random.randrange(self.longest)
        tail = [self.random.randrange(90) for _ in range(self.random.randrange(6))]
        return (stem[:shared] + tail)[: self.longest] or [1]

    def request(self, prompt):
        self.count += 1
        stop = {} if self.random.random() < 0.3 else {"ignore_eos": False, "min_tokens": self.random.choice((0, 0, 2))}
        if self.random.random() < 0.5:
            stop["stop_token_ids"] = tuple(self.random.sample(range(90), self.random.choice((4, 12))))
        extra = {"num_logprobs": 0} if self.random.random() < 0.1 else {}
        return request_of(
            prompt,
            self.random.randint(1, self.max_outputs),
            name=f"r{self.count}",
            seed=self.random.randrange(4),
            priority=self.random.choice((0, 0, 0, 1)),
            **stop,
            **extra,
        )

    def ask(self):
        kind = self.random.choice(self.kinds)
        request = self.request(self.prompt())
        engine = self.rig.engine
        try:
            if kind == "local":
                self.local[engine.submit(request, FAR)] = request
            elif kind == "source":
                self.sources[engine.submit_source(request, FAR)] = request
            else:
                handover = HandOver(self, request)
                handover.seq = engine.book(request, FAR, handover.on_booked)
                self.handovers[handover.seq] = handover
        except TandemError:
            self.refused += 1

    # What happens.

    def step(self, *, asks=True):
        if asks and self.random.random() < self.ask_rate:
            self.ask()
        for handover in list(self.handovers.values()):
            handover.step()
        self._release_some()
        if self.random.random() < self.abort_rate:
            self._abort_one()
        self._scribble()
        self.rig.clock.advance(0.01)
        worked = self.rig.turn()
        self._read_announced()
        return worked

    def drain(self, limit=3000):
        """No more requests: everything ends by itself; fails if nothing moves while work is left."""
        idle = 0
        for _ in range(limit):
            worked = self.step(asks=False)
            if not self.pending():
                break
            idle = 0 if worked or self.outside() else idle + 1
            assert idle < 5, f"stuck: {self.rig.engine.statistics()}"
        else:
            raise AssertionError(f"not over after {limit} passes: {self.rig.engine.statistics()}")
        self.verify()
        self.rig.assert_nothing_held()

    def pending(self):
        return self.rig.engine.statistics()["sequences"] or self.handovers or self.stale

    def outside(self):
        """True if the next move is somebody else's: a reader of held pages, or a remote writer."""
        return bool(self.handovers or self.stale or any(seq in self.rig.sink.prefilled for seq in self.sources))

    def truth(self, request):
        limit = min(request.stop.max_tokens, self.rig.engine._facts.max_positions - request.num_prompt_tokens)
        return reply(
            request.token_ids,
            limit,
            request.sampling.seed,
            ring_tokens=self.rig.ring_tokens,
            stop=self.stops(request),
            min_tokens=request.stop.min_tokens,
        )

    def stops(self, request):
        return {*request.stop.stop_token_ids, *(() if request.stop.ignore_eos else (EOS,))}

    def reason(self, request, wanted):
        ends = wanted[-1] in self.stops(request) and len(wanted) > request.stop.min_tokens
        return FinishReason.STOP if ends else FinishReason.LENGTH

    def verify(self):
        sink = self.rig.sink
        for seq, request in self.local.items():
            wanted, got = self.truth(request), sink.tokens[seq]
            if seq in sink.finished:
                assert got == wanted, f"sequence {seq}: {got} is not {wanted}"
                assert sink.finished[seq].num_output_tokens == len(wanted)
                assert sink.finished[seq].reason is self.reason(request, wanted)
                assert seq in sink.started
            else:
                assert got == wanted[: len(got)]
                assert (seq in sink.failed) != (seq in self.aborted), f"sequence {seq} has no end"

    def _abort_one(self):
        sink = self.rig.sink
        alive = [seq for seq in (*self.local, *self.sources) if seq not in sink.finished and seq not in sink.failed]
        if alive:
            seq = self.random.choice(alive)
            self.aborted.add(seq)
            self.sources.pop(seq, None)
            self.rig.engine.abort(seq)

    def _release_some(self):
        sink = self.rig.sink
        for seq, request in list(self.sources.items()):
            if seq in sink.failed:
                del self.sources[seq]
            elif seq in sink.prefilled and self.random.random() < 0.3:
                done = sink.prefilled[seq]
                assert done.first_tokens == tuple(self.truth(request)[:1])
                assert done.num_tokens == sink.chunks[seq][-1].end == len(request.token_ids)
                assert self.rig.engine.epochs_unchanged(seq)
                for chunk in sink.chunks[seq]:
                    self._check_chunk(request, chunk)
                self.rig.engine.release(seq)
                del self.sources[seq]

    def _read_announced(self):
        """A destination reads as soon as it hears: the bytes must be there."""
        for seq, request in self.sources.items():
            chunks = self.rig.sink.chunks.get(seq, [])
            assert [c.start for c in chunks] == [0, *(c.end for c in chunks)][: len(chunks)]
            for chunk in chunks[-1:]:
                self._check_chunk(request, chunk)

    def _check_chunk(self, request, chunk):
        size = self.rig.config.page_tokens
        slots = self.rig.runner.pages[[ref.page for ref in chunk.pages]].reshape(-1, 2)[: chunk.end - chunk.start]
        assert chunk.start % size == 0
        assert slots[:, 0].tolist() == list(request.token_ids[chunk.start : chunk.end]), (
            "announced before it was written"
        )
        assert slots[:, 1].tolist() == list(range(chunk.start, chunk.end))

    def _scribble(self):
        """Stale writers write what they like until their pages are proven."""
        for pages in list(self.stale):
            self.rig.runner.pages[pages] = -7
            if self.random.random() < 0.3:
                self.stale = [other for other in self.stale if other is not pages]
                self.rig.engine.prove(pages)


class HandOver:
    """One booked request: lands chunk by chunk, with a delay before bytes arrive, then commits or is dropped."""

    def __init__(self, traffic, request):
        self.traffic, self.request = traffic, request
        self.seq = None
        self.booking = None
        self.next_token = 0
        self.waiting = False
        self.arriving = []

    def on_booked(self, result):
        if isinstance(result, TandemError):
            self._gone()
        else:
            self.booking = result
            self.next_token = result.prefix_tokens

    def on_pages(self, result):
        self.waiting = False
        if isinstance(result, TandemError):
            self._gone()
        elif self.traffic.random.random() < 0.5:
            # The fastest writer there can be: bytes arrive while steps that used the pages before may be in flight.
            self._write(result)
        else:
            self.arriving.append(result)

    def step(self):
        traffic, total = self.traffic, len(self.request.token_ids)
        rng, size = traffic.random, traffic.rig.config.page_tokens
        if self.booking is None:
            if rng.random() < 0.02:
                traffic.rig.engine.abort(self.seq)
            return
        if self.arriving and rng.random() < 0.5:
            self._write(self.arriving.pop(0))
        if rng.random() < 0.03:
            self._drop()
        elif self.next_token < total and not self.waiting:
            end = min(total, self.next_token + size * rng.randint(1, 3))
            end = end if end == total else end - end % size
            self.waiting = True
            start, self.next_token = self.next_token, end
            traffic.rig.engine.land(self.seq, start, end, self.on_pages)
        elif self.next_token == total and not self.waiting and not self.arriving:
            self._commit()

    def _write(self, landing):
        pages, size = self.traffic.rig.runner.pages, self.traffic.rig.config.page_tokens
        for position in range(landing.start, landing.end):
            page = landing.pages[position // size - landing.start // size]
            pages[page, position % size] = (self.request.token_ids[position], position)

    def _commit(self):
        traffic, rig = self.traffic, self.traffic.rig
        wanted = traffic.truth(self.request)
        if rig.ring_tokens:
            ring, total = rig.ring_tokens, len(self.request.token_ids)
            for position in range(max(0, total - ring), total):
                rig.runner.rings[self.booking.row, position % rig.runner.ring_size] = self.request.token_ids[position]
        reason = traffic.reason(self.request, wanted) if len(wanted) == 1 else None
        rig.engine.commit(self.seq, wanted[:1], (), reason, 0)
        rig.sink.tokens[self.seq] = wanted[:1]
        rig.sink.first_position[self.seq] = 0
        rig.sink.started[self.seq] = None
        traffic.local[self.seq] = self.request
        self._gone()

    def _drop(self):
        traffic = self.traffic
        open_pages = [page for landing in self.arriving for page in landing.pages]
        open_pages = list(dict.fromkeys(open_pages))
        if traffic.random.random() < 0.5:
            traffic.rig.engine.abort(self.seq)
        traffic.rig.engine.drop(self.seq, open_pages)
        if open_pages:
            traffic.stale.append(np.array(open_pages))
        self._gone()

    def _gone(self):
        self.traffic.handovers.pop(self.seq, None)
