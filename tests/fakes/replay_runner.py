"""A runner whose "model" replays: entries in pages, windows in rings per row, a decoder for the end of prompts alone.

Every number is a hash of exactly what the rules of replay let a row see. An encoder row sees its token, the encoder rows
of its window down to the floor, and all entries before it; it becomes an entry. A decoder row sees its encoder row, the
decoder rows of its window, and all entries; the token comes from it. Nothing is ever forgotten by these hashes, so a
wrong floor, a page of another kind, an entry written over or left out, or a wrong prompt length changes the text.
`replay_text` is the truth in plain Python: what a request with given floors must say.
"""

import numpy as np

from core.errors import InvariantError
from core.request import NO_FLOORS
from engine.cache.hit import ReuseKind, ReuseRule
from engine.plan import StepResult, decode_plan

WINDOW = 6
VOCAB = 97
RULE = ReuseRule(kind=ReuseKind.REPLAY, replay_tokens=6, align_tokens=2, keep_tokens=9)
_M = (1 << 61) - 1


def mix(*numbers):
    """Order-sensitive hash, 61 bits."""
    value = 0x1F83D9ABFB41BD6B
    for number in numbers:
        value = (value ^ (number + 0x9E3779B9)) * 0x2545F4914F6CDD1D % _M
        value ^= value >> 29
    return value


class Memory:
    """What one sequence reads and writes; `entry` and the windows are positions -> number."""

    def entry(self, position):
        raise NotImplementedError

    def write_entry(self, position, value):
        raise NotImplementedError

    def window(self, kind, position):
        raise NotImplementedError

    def write_window(self, kind, position, value):
        raise NotImplementedError


def compute_row(memory, token, position, *, floor, decoder_floor, write_from, seed):
    """Run one row through the model; returns the token it chooses, or None if the decoder left it out."""
    window = [memory.window("encoder", p) for p in range(max(floor, position - WINDOW + 1), position)]
    entries = mix(*(memory.entry(p) for p in range(position)))
    row = mix(token, position, entries, *window)
    memory.write_window("encoder", position, row)
    if position >= write_from:
        memory.write_entry(position, mix(row, 7))
    if position < decoder_floor:
        return None
    low = max(floor, decoder_floor, position - WINDOW + 1)
    window = [memory.window("decoder", p) for p in range(low, position)]
    row = mix(row, entries, memory.entry(position), *window)
    memory.write_window("decoder", position, row)
    return mix(row, seed, position) % VOCAB


class _Dicts(Memory):
    def __init__(self):
        self.entries = {}
        self.windows = {"encoder": {}, "decoder": {}}

    def entry(self, position):
        return self.entries[position]

    def write_entry(self, position, value):
        assert position not in self.entries, "an entry is written once"
        self.entries[position] = value

    def window(self, kind, position):
        return self.windows[kind][position]

    def write_window(self, kind, position, value):
        self.windows[kind][position] = value


def replay_text(prompt, num_tokens, seed=0, floors=NO_FLOORS, rule=RULE):
    """What a request with these floors says, computed hit by hit in one go each."""
    memory, tokens = _Dicts(), list(prompt)
    bounds = (0, *floors.hits, len(prompt))
    chosen = None
    for held, end in zip(bounds, bounds[1:], strict=False):
        last = end == len(prompt)
        floor = floors.encoder_floor if last else max(0, held - rule.replay_tokens)
        for position in range(floor, end):
            chosen = compute_row(
                memory,
                tokens[position],
                position,
                floor=floor,
                decoder_floor=floors.decoder_floor if last else end,
                write_from=held,
                seed=seed,
            )
    for _ in range(num_tokens):
        tokens.append(chosen)
        chosen = compute_row(
            memory,
            tokens[-1],
            len(tokens) - 1,
            floor=floors.encoder_floor,
            decoder_floor=floors.decoder_floor,
            write_from=floors.hit_tokens,
            seed=seed,
        )
    return tokens[len(prompt) :]


class _RowMemory(Memory):
    """One row of the runner: entries through its page table, windows in its rings, each with the position it is of."""

    def __init__(self, runner, row):
        self.runner, self.row = runner, row

    def _slot(self, position):
        page = int(self.runner.table[self.row, position // self.runner.page_tokens])
        assert page > 0, "the SINK is touched"
        return page, position % self.runner.page_tokens

    def entry(self, position):
        value, of = self.runner.pages[self._slot(position)].tolist()
        assert of == position, f"the entry of {position} was never written"
        return value

    def write_entry(self, position, value):
        page, offset = self._slot(position)
        self.runner.pages[page, offset] = (value, position)
        self.runner.written.add(page)

    def window(self, kind, position):
        rings = self.runner.rings[kind]
        value, of = rings[self.row, position % rings.shape[1]].tolist()
        assert of == position, f"the {kind} row of {position} was never written"
        return value

    def write_window(self, kind, position, value):
        rings = self.runner.rings[kind]
        rings[self.row, position % rings.shape[1]] = (value, position)


class _Ahead(_Dicts):
    """What would follow on a row's memory: reads through to it, writes beside it."""

    def __init__(self, below):
        super().__init__()
        self.below = below

    def entry(self, position):
        return super().entry(position) if position in self.entries else self.below.entry(position)

    def window(self, kind, position):
        return super().window(kind, position) if position in self.windows[kind] else self.below.window(kind, position)


class ReplayRunner:
    """`Runner` over numpy memory that computes at collect, as late as it can. Pages hold (entry, position).

    With `num_drafts` it speculates, as `KvRunner` does: wrong drafts are computed like right ones and left lying.
    """

    def __init__(
        self, num_pages, num_rows, page_tokens, *, rule=RULE, on_launch=None, num_drafts=0, is_right=lambda: True
    ):
        self.pages = np.full((num_pages, page_tokens, 2), -1, np.int64)
        ring = WINDOW + 2 + num_drafts
        self.rings = {kind: np.full((num_rows, ring, 2), -1, np.int64) for kind in ("encoder", "decoder")}
        self._num_drafts, self._is_right = num_drafts, is_right
        self._drafts, self._length = {}, {}
        self.table = np.zeros((num_rows, num_pages), np.int32)
        self.page_tokens = page_tokens
        self.written = set()
        self.computed = []
        """(row, start, end, write_from) of every piece of every step."""
        self._rule, self._on_launch = rule, on_launch
        self._inits, self._next = {}, {}
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
        self._queue.append(plan)
        return plan

    def collect(self, handle):
        assert self._queue.pop(0) is handle
        return self._run(handle)

    def close(self):
        self._queue.clear()

    def _run(self, plan):
        for row, column, page in plan.table_deltas.tolist():
            self.table[row, column] = page
        for init in plan.extra.inits:
            self._inits[init.row] = init
            if init.next_token >= 0:
                self._next[init.row] = init.next_token
            self._drafts[init.row] = []
            if init.next_token >= 0:
                self._length[init.row] = len(init.token_ids) // 4 - 1
        tokens = np.full((len(plan.rows), 1 + self._num_drafts), -1, np.int32)
        count, drafted = np.zeros(len(plan.rows), np.int32), np.zeros(len(plan.rows), np.int32)
        written_by, computed = {}, 0
        for i, row in enumerate(plan.rows.tolist()):
            init = self._inits[row]
            assert init.generation == plan.gens[i], "the row was not set up for its owner"
            start, ids = self._query(plan, i, init)
            if not ids:
                continue
            computed += len(ids)
            self.computed.append((row, start, start + len(ids), init.write_from))
            self.written = set()
            chosen = self._row(_RowMemory(self, row), init, ids, start)
            for page in self.written:
                assert written_by.setdefault(page, row) == row, "two rows write one page"
            self._length[row] = start + len(ids)
            if plan.sample[i]:
                run = chosen[-1:] if not plan.use_next[i] else _run(chosen, ids)
                assert None not in run, "the row that chooses a token never reached the decoder"
                tokens[i, : len(run)], count[i] = run, len(run)
                drafted[i] = len(ids) - 1 if plan.use_next[i] else 0
                self._next[row] = run[-1]
                self._length[row] -= len(ids) - len(run) if plan.use_next[i] else 0
                self._drafts[row] = self._make_drafts(row, init)
        return StepResult(
            step=plan.step,
            tokens=tokens,
            count=count,
            forward_s=0.001,
            drafted=drafted if self._num_drafts else None,
            computed=computed,
        )

    def _query(self, plan, i, init):
        row, length = int(plan.rows[i]), int(plan.q_start[i + 1] - plan.q_start[i])
        if not plan.use_next[i]:
            return int(plan.seq_start[i]), plan.tokens[plan.q_start[i] : plan.q_start[i + 1]].tolist()
        if not self._num_drafts:
            return int(plan.seq_start[i]), [self._next[row]]
        start = self._length[row]
        assert plan.seq_start[i] <= start, "the plan's length is not a lower bound"
        return start, [self._next[row], *self._drafts[row]][: max(0, min(length, init.kv_limit - start))]

    def _make_drafts(self, row, init):
        drafts, start = [], self._length[row]
        if init.kv_limit - start < 2:
            return drafts
        ahead, token = _Ahead(_RowMemory(self, row)), self._next[row]
        for i in range(self._num_drafts):
            (truth,) = self._row(ahead, init, [token], start + i)
            token = truth if self._is_right() else (truth + 1) % VOCAB
            drafts.append(token)
        return drafts

    def _row(self, memory, init, ids, start):
        """Compute tokens of a row; returns what each of them chooses."""
        keep_from = init.known_tokens - self._rule.keep_tokens if init.known_tokens else 0
        return [
            compute_row(
                memory,
                token,
                position,
                floor=init.encoder_floor,
                decoder_floor=keep_from,
                write_from=init.write_from,
                seed=init.sampling.seed,
            )
            for position, token in enumerate(ids, start)
        ]


def _run(chosen, ids):
    """The tokens that stand: up to the first one that the next query token differs from."""
    for i, token in enumerate(chosen[:-1]):
        if token != ids[i + 1]:
            return chosen[: i + 1]
    return chosen
