"""Random traffic for two engines that replay: local prompts, exact ones, hand-overs, retractions, resumes, flushes.

Whatever happens, every text is what the floors that were reported for it demand; a request that came with floors keeps
them. Turns of one conversation grow on each other, so hits pile up on hits.
"""

import random

from core.errors import TandemError
from core.request import NO_FLOORS, with_floors
from tests.fakes.engine_rig import request_of
from tests.fakes.replay_rig import FAR, ReplayRig, hand_over


class ReplayTraffic:
    """Two rigs and a seeded generator; `step` does one random thing and some passes."""

    def __init__(self, seed, *, longest=56, other=None, **settings):
        """`other`: settings of the second engine that differ from the first one's."""
        self.random = random.Random(seed)
        self.longest = longest
        self.rigs = [ReplayRig(**settings), ReplayRig(**settings | (other or {}))]
        self.stems = [[self.random.randrange(90) for _ in range(longest)] for _ in range(2)]
        self.waiting = []
        """(rig, sequence, request, floors that its source reported): texts that are not checked yet."""
        self.said = []
        """(request, its tokens so far, its floors): what can be resumed, or be a turn of a conversation."""
        self.most_hits = 0

    def prompt(self):
        rng = self.random
        if self.said and rng.random() < 0.4:
            request, tokens, _ = rng.choice(self.said)
            start = [*request.token_ids, *tokens]
        else:
            start = rng.choice(self.stems)[: rng.randint(1, self.longest)]
        return (start + [rng.randrange(90) for _ in range(rng.randrange(12))])[: self.longest] or [1]

    def request(self):
        rng = self.random
        if self.said and rng.random() < 0.3:
            request, tokens, floors = rng.choice(self.said)
            left = request.stop.max_tokens - request.num_output_tokens
            if left > 1 and tokens:
                outputs = tokens[: rng.randint(1, min(left - 1, len(tokens)))]
                prompt = request.token_ids[: request.num_prompt_tokens]
                earlier = request.token_ids[request.num_prompt_tokens :]
                return with_floors(
                    request_of(
                        prompt, request.stop.max_tokens, outputs=(*earlier, *outputs), seed=request.sampling.seed
                    ),
                    floors,
                )
        request = request_of(self.prompt(), rng.randint(1, 12), seed=rng.randrange(3))
        return with_floors(request, NO_FLOORS if rng.random() < 0.15 else None)

    def step(self):
        rng = self.random
        rig, other = rng.sample(self.rigs, 2)
        request, what = self.request(), rng.random()
        if what < 0.6:
            self.submit(rig, request)
        elif what < 0.85 and all(len(request.token_ids) + 20 < r.config.num_pages * 4 for r in self.rigs):
            self.settle()
            seq, _, done = hand_over(rig, other, request)
            self.waiting.append((other, seq, request, done.floors))
        elif what < 0.95:
            rig.engine._planner._retract_one(0.0, keep=0)
        else:
            rig.engine.flush_cache()
        for _ in range(rng.randrange(8)):
            for each in self.rigs:
                each.turn()

    def submit(self, rig, request):
        try:
            self.waiting.append((rig, rig.engine.submit(request, FAR), request, None))
        except TandemError:
            return

    def settle(self):
        """Let everything end, then compare every text."""
        for rig in self.rigs:
            rig.run()
        for entry in self.waiting:
            self.check(*entry)
        self.waiting.clear()

    def check(self, rig, seq, request, floors):
        sink = rig.sink
        assert seq in sink.finished, sink.failed.get(seq)
        tokens = sink.tokens[seq]
        floors = floors if floors is not None else sink.started[seq].floors
        assert request.floors in (None, floors), "floors were given up"
        prompt = list(request.token_ids[: request.num_prompt_tokens])
        wanted = rig.truth(prompt, request.stop.max_tokens, floors, request.sampling.seed)
        assert [*request.token_ids[len(prompt) :], *tokens] == wanted, (request, floors)
        self.most_hits = max(self.most_hits, len(floors.hits))
        self.said.append((request, list(tokens), floors))

    def drain(self):
        self.settle()
        for rig in self.rigs:
            rig.assert_nothing_held()
