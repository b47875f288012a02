"""Drafters for tests: an oracle that knows the texts and errs by script, over any model.

The oracle learns each row's tokens by observing, looks its text up, and proposes what follows, or something else where
`is_right` says so. Where it knows no text it repeats the last token. With `logits` it draws its drafts from logits of its
own through the runner's `choose`, as a draft model does.
"""

import numpy as np
import torch

from engine.models.drafter import Captures, Proposal


class DraftingModel:
    """Implements `engine.models.drafter.SpeculativeModel` around a model without a drafter of its own."""

    def __init__(self, model, texts, is_right=lambda: True, *, num_drafts=4, logits=False):
        self.facts = model.facts
        self.device = model.device
        self.num_drafts = num_drafts
        self.texts = texts
        self.is_right = is_right
        self.logits = logits
        self._model = model

    def kv_layout(self, num_pages, num_rows, page_tokens):
        return self._model.kv_layout(num_pages, num_rows, page_tokens)

    def forward(self, batch, kv):
        return self._model.forward(batch, kv)

    def forward_captured(self, batch, kv):
        every = torch.arange(len(batch.token_ids))
        return self._model.forward(batch, kv), Captures(every, batch.token_ids[:, None])

    def drafter(self, kv):
        return OracleDrafter(self)


class OracleDrafter:
    """Implements `engine.models.drafter.Drafter`; checks what the runner tells it."""

    def __init__(self, model):
        self.num_drafts = model.num_drafts
        self._model = model
        self._known = {}

    def observe(self, batch, captures, committed):
        assert (committed >= 1).all() and (committed <= np.diff(batch.q_start)).all()
        ids = captures.values[:, 0].tolist()
        for i, row in enumerate(batch.rows.tolist()):
            start, begin = int(batch.seq_start[i]), int(batch.q_start[i])
            known = self._known.get(row, {})
            # A row that goes on elsewhere than where it stood has a new owner.
            known = {p: t for p, t in known.items() if p < start} if start and start - 1 in known else {}
            known |= dict(enumerate(ids[begin : begin + int(committed[i])], start))
            self._known[row] = known

    def propose(self, wanted, choose):
        truths = [
            self._truth(row, anchor, length)
            for row, anchor, length in zip(
                wanted.rows.tolist(), wanted.anchors.tolist(), wanted.lengths.tolist(), strict=True
            )
        ]
        vocab = self._model.facts.vocab_size
        guesses = np.array([[t if self._model.is_right() else (t + 1) % vocab for t in truth] for truth in truths])
        if self._model.logits:
            for i in range(self.num_drafts):
                logits = torch.nn.functional.one_hot(torch.from_numpy(guesses[:, i]), vocab).double() * 6
                guesses[:, i] = choose(i, logits)
        confidences = np.linspace(0.9, 0.3, self.num_drafts, dtype=np.float32)
        return Proposal(guesses, np.tile(confidences, (len(truths), 1)))

    def _truth(self, row, anchor, length):
        """What follows the anchor at position `length` in the text that the row's known tokens belong to."""
        known = self._known[row] | {length: anchor}
        assert max(known) == length, "the anchor does not follow on what was observed"
        for text in self._model.texts:
            if len(text) > length and all(text[p] == t for p, t in known.items()):
                rest = list(text[length + 1 : length + 1 + self.num_drafts])
                return rest + [anchor] * (self.num_drafts - len(rest))
        return [anchor] * self.num_drafts
