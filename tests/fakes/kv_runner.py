"""A runner whose "model" is its KV: the next token is a hash of everything it reads back through the page table.

Writes (token, position) into a numpy page memory and picks the next token from ALL slots of the context, so a wrong,
missing, reused or foreign page changes the text. `when` says at which moment a launched step touches memory: at launch
(as early as possible) or at collect (as late as possible). With `ring_tokens` each row also keeps the last tokens in a
per-row ring that the hash reads. `reply` is the truth in plain Python.

With `num_drafts` it speculates: lengths live in the runner, `is_right` says of each draft whether it is the true token,
and wrong drafts are written like right ones, beyond what will be committed.
"""

import numpy as np

from core.errors import InvariantError
from engine.plan import StepResult, decode_plan

_M = (1 << 61) - 1


def _mix(tokens, positions):
    """Order- and position-sensitive hash of a context."""
    index = np.arange(1, len(tokens) + 1, dtype=np.uint64)
    x = tokens.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + positions.astype(np.uint64) * np.uint64(
        0xBF58476D1CE4E5B9
    )
    x ^= index * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(29)
    x *= np.uint64(0xD6E8FEB86659FD93)
    return int(x.sum(dtype=np.uint64))


def _choose(tokens, positions, ring, seed, vocab_size):
    value = _mix(tokens, positions) + 31 * (_mix(ring, np.arange(len(ring))) if len(ring) else 0) + 0x51ED27 * seed
    return (value * 0x2545F4914F6CDD1D % _M) % vocab_size


def reply(prompt, num_tokens, seed=0, vocab_size=97, ring_tokens=0, stop=(), min_tokens=0):
    """The outputs that an undisturbed run gives."""
    tokens = list(prompt)
    for count in range(1, num_tokens + 1):
        context = np.array(tokens, np.int64)
        ring = context[-ring_tokens:] if ring_tokens else context[:0]
        tokens.append(_choose(context, np.arange(len(context)), ring, seed, vocab_size))
        if tokens[-1] in stop and count > min_tokens:
            break
    return tokens[len(prompt) :]


class KvRunner:
    """`Runner` over numpy memory: `pages` int64 [num_pages, page_tokens, 2], `rings` int64 [num_rows, ring]."""

    def __init__(
        self,
        num_pages,
        num_rows,
        page_tokens,
        *,
        vocab_size=97,
        ring_tokens=0,
        when=lambda step: "collect",
        on_launch=None,
        num_drafts=0,
        is_right=lambda: True,
    ):
        self.pages = np.full((num_pages, page_tokens, 2), -1, np.int64)
        self.ring_size = ring_tokens + num_drafts
        self.rings = np.full((num_rows, max(1, self.ring_size)), -1, np.int64)
        self.ring_tokens = ring_tokens
        self.num_drafts = num_drafts
        self.vocab_size = vocab_size
        self.page_tokens = page_tokens
        self.computed = []
        self._when = when
        self._on_launch = on_launch
        self._table = np.zeros((num_rows, num_pages), np.int32)
        self._next = np.full(num_rows, -1, np.int64)
        self._seed = np.zeros(num_rows, np.int64)
        self._generation = np.full(num_rows, -1, np.int64)
        self._is_right = is_right
        self._length = np.zeros(num_rows, np.int64)
        self._limit = np.zeros(num_rows, np.int64)
        self._drafts = [[] for _ in range(num_rows)]
        self._launched = 0
        self._queue = []

    def launch(self, plan):
        plan = decode_plan(plan)
        if plan.step != self._launched + 1:
            raise InvariantError("plan gap")
        assert len(self._queue) < 2
        self._launched = plan.step
        if self._on_launch is not None:
            self._on_launch(plan)
        handle = {"plan": plan, "result": None}
        self._queue.append(handle)
        if self._when(plan.step) == "launch":
            for earlier in self._queue:
                self._run(earlier)
        return handle

    def collect(self, handle):
        assert self._queue[0] is handle
        self._queue.pop(0)
        self._run(handle)
        return handle["result"]

    def close(self):
        self._queue.clear()

    def _run(self, handle):
        if handle["result"] is not None:
            return
        plan = handle["plan"]
        for row, column, page in plan.table_deltas.tolist():
            self._table[row, column] = page
        for init in plan.extra.inits:
            self._set_row(init)
        rows = plan.rows.tolist()
        assert len(set(rows)) == len(rows)
        chunks = [self._query(plan, i) for i in range(len(rows))]
        written = set()
        for row, (start, ids) in zip(rows, chunks, strict=True):
            pages = self._write(row, start, ids)
            assert not pages & written, "two rows write one page"
            written |= pages
        tokens = np.full((len(rows), 1 + self.num_drafts), -1, np.int32)
        count = np.zeros(len(rows), np.int32)
        drafted = np.zeros(len(rows), np.int32)
        for i, (row, (start, ids)) in enumerate(zip(rows, chunks, strict=True)):
            self.computed.append((row, start, start + len(ids)))
            decodes = bool(plan.use_next[i])
            self._length[row] = start + len(ids)
            if not plan.sample[i] or not ids:
                continue
            if decodes:
                drafted[i] = len(ids) - 1
            run = self._judge(row, start, ids) if decodes else [self._read(row, start + len(ids))]
            tokens[i, : len(run)] = run
            count[i] = len(run)
            if decodes:
                self._length[row] = start + len(run)
            self._next[row] = run[-1]
            self._drafts[row] = self._make_drafts(row)
        handle["result"] = StepResult(
            step=plan.step,
            tokens=tokens,
            count=count,
            forward_s=0.001,
            drafted=drafted if self.num_drafts else None,
            computed=sum(len(ids) for _, ids in chunks),
        )

    def _set_row(self, init):
        self._seed[init.row] = init.sampling.seed
        self._generation[init.row] = init.generation
        self._limit[init.row] = init.kv_limit
        self._drafts[init.row] = []
        if init.next_token >= 0:
            self._next[init.row] = init.next_token
            self._length[init.row] = len(init.token_ids) // 4 - 1

    def _query(self, plan, i):
        """Where a row's query tokens begin, and their ids."""
        row, start, length = int(plan.rows[i]), int(plan.seq_start[i]), int(plan.q_start[i + 1] - plan.q_start[i])
        assert self._generation[row] == plan.gens[i], "the row was not set up for its owner"
        if not plan.use_next[i]:
            return start, plan.tokens[plan.q_start[i] : plan.q_start[i + 1]].tolist()
        if not self.num_drafts:
            return start, [int(self._next[row])]
        assert start <= self._length[row], "the plan's length is not a lower bound"
        start = int(self._length[row])
        ids = [int(self._next[row]), *self._drafts[row]]
        return start, ids[: max(0, min(length, int(self._limit[row]) - start))]

    def _write(self, row, start, ids):
        pages = set()
        for position, token in enumerate(ids, start):
            page = int(self._table[row, position // self.page_tokens])
            assert page > 0, "a token would be written to the SINK"
            pages.add(page)
            self.pages[page, position % self.page_tokens] = (token, position)
            if self.ring_tokens:
                self.rings[row, position % self.ring_size] = token
        return pages

    def _judge(self, row, start, ids):
        run = []
        for i in range(len(ids)):
            run.append(self._read(row, start + i + 1))
            if i + 1 == len(ids) or run[-1] != ids[i + 1]:
                return run
        return run

    def _make_drafts(self, row):
        if self._limit[row] - self._length[row] < 2:
            return []
        drafts = []
        for _ in range(self.num_drafts):
            truth = self._read(row, int(self._length[row]), [int(self._next[row]), *drafts])
            drafts.append(truth if self._is_right() else (truth + 1) % self.vocab_size)
        return drafts

    def _read(self, row, end, behind=()):
        """The next token after `end` tokens of KV, or after some more that are not in KV yet."""
        pages = self._table[row, : -(-end // self.page_tokens)]
        context = self.pages[pages].reshape(-1, 2)[:end]
        ring = np.zeros(0, np.int64)
        if self.ring_tokens:
            positions = np.arange(max(0, end - self.ring_tokens), end)
            ring = self.rings[row, positions % self.ring_size]
            ring = np.concatenate((ring, np.array(behind, np.int64)))[-self.ring_tokens :]
        tokens = np.concatenate((context[:, 0], np.array(behind, np.int64)))
        positions = np.concatenate((context[:, 1], np.arange(end, end + len(behind))))
        return _choose(tokens, positions, ring, int(self._seed[row]), self.vocab_size)
