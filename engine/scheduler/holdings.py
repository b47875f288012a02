"""What sequences hold: rows, pages and locks on the prefix, and the moves that keep the three in step.

The one place that ties row table, page pool and prefix tree together; every page or row that changes hands in the
engine does so through a method here. Decides nothing: who is admitted, retracted or ended is said by its callers.
"""

from collections import deque

import numpy as np
import numpy.typing as npt

from core.errors import InvariantError
from core.hashing import PageHasher
from core.kv import KVLayout
from core.request import GenerateRequest
from engine.cache.events import EventRecorder
from engine.cache.hit import ReuseKind, only_nothing
from engine.cache.page_pool import PagePool
from engine.cache.plain_names import PlainNames
from engine.cache.prefix_tree import PrefixTree
from engine.cache.receipt import HeldRow
from engine.cache.tier import TierPort
from engine.config import CapacityPlan, EngineConfig, TokenFacts, reuse_rule
from engine.events import SeqId
from engine.scheduler.chains import Chains
from engine.scheduler.limits import Limits
from engine.scheduler.row_table import RowFlag, RowState, RowTable
from engine.sequence import SeqState, Sequence
from engine.stage import Prefix, next_stage

I32 = npt.NDArray[np.int32]

LOG_LENGTH = 1000

_ROW_STATES: dict[SeqState, RowState] = {
    SeqState.PREFILLING: RowState.PREFILLING,
    SeqState.RUNNING: RowState.RUNNING,
    SeqState.HELD: RowState.HELD,
    SeqState.BOOKED: RowState.BOOKED,
    SeqState.LANDING: RowState.BOOKED,
    SeqState.ABANDONED: RowState.BOOKED,
}


class Holdings:
    """Rows, pool, tree and living sequences of one engine. Scheduler thread only."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        capacity: CapacityPlan,
        layout: KVLayout,
        facts: TokenFacts,
        hasher: PageHasher,
        tier: TierPort,
    ) -> None:
        self.config = config
        self.capacity = capacity
        self.limits = Limits(facts)
        rule = reuse_rule(config, layout, facts)
        self.reuses_pages = config.prefix_cache and rule.kind is not ReuseKind.NONE
        self.recorder = EventRecorder()
        self.pool = PagePool(config.num_pages, config.page_tokens)
        names = PlainNames(self.recorder)
        self.tree = PrefixTree(
            self.pool,
            recorder=names if rule.replays else self.recorder,
            tier=tier,
            legality=rule.legality if self.reuses_pages else only_nothing,
        )
        self.chains = Chains(rule, hasher, self.tree, names, caches=self.reuses_pages)
        # One token more than KV can hold: the last one is chosen and never written.
        longest = min(facts.max_positions, capacity.max_pages * config.page_tokens + 1)
        self.rows = RowTable(config.num_rows, capacity.max_pages, longest)
        self.sequences: dict[SeqId, Sequence] = {}
        self.promised_pages = 0
        """Pages of bookings that are not allocated yet."""
        self.fresh_rows: dict[int, int] = {}
        """Rows that the runner must set up before their next step, with the token to decode first, or -1."""
        self.launched = 0
        self.retired = 0
        self.log: deque[tuple[int, str, int, int]] = deque(maxlen=LOG_LENGTH)
        """(launched step, operation, sequence, detail): the last operations, for a post-mortem."""
        self._next_id = 1

    # Sequences.

    def create(self, request: GenerateRequest, deadline: float, state: SeqState, *, is_source: bool) -> Sequence:
        """Make the record of a checked request; it holds nothing yet."""
        tokens = np.asarray(request.token_ids, np.int32)
        seq = Sequence(
            id=SeqId(self._next_id),
            request=request,
            deadline=deadline,
            arrival=self._next_id,
            is_source=is_source,
            state=state,
            tokens=tokens,
            hashes=[],
            num_cached_tokens=request.num_cached_tokens,
            floors=self.chains.floors_of(request),
        )
        self._next_id += 1
        self.chains.begin(seq)
        self.sequences[seq.id] = seq
        self.note("create", seq)
        return seq

    def move(self, seq: Sequence, to: SeqState) -> None:
        """Change a sequence's state, and its row's with it."""
        seq.move(to)
        if seq.row >= 0 and to in _ROW_STATES:
            self.rows.state[seq.row] = _ROW_STATES[to]
        self.note(to.value, seq)

    def note(self, operation: str, seq: Sequence, detail: int = 0) -> None:
        """Remember an operation for the post-mortem."""
        self.log.append((self.launched, operation, seq.id, detail))

    def forget(self, seq: Sequence) -> None:
        """End a sequence that holds nothing any more."""
        if seq.row >= 0 or seq.receipt is not None:
            raise InvariantError(f"sequence {seq.id} ends while it holds a row or a receipt")
        self.move(seq, SeqState.ENDED)
        del self.sequences[seq.id]

    # Rows.

    def open_row(self, seq: Sequence, state: SeqState) -> int:
        """Give a row to a sequence that locked its prefix, fill the row's arrays, and enter `state`."""
        rows, request = self.rows, seq.request
        seq.move(state)
        row = rows.take(seq.id, _ROW_STATES[state])
        seq.row = row
        rows.set_tokens(row, seq.tokens)
        rows.goal[row] = len(seq.tokens)
        rows.num_prompt[row] = seq.num_prompt
        rows.max_len[row] = self.limits.max_len(request)
        rows.kv_limit[row] = seq.kv_limit(int(rows.max_len[row]), self.capacity.max_pages * self.config.page_tokens)
        rows.stops_from[row] = seq.num_prompt + request.stop.min_tokens
        rows.priority[row] = request.priority
        rows.preempts[row] = seq.preempts
        rows.set_stops(row, self.limits.stop_ids(request))
        if seq.is_source:
            rows.flags[row] |= RowFlag.SOURCE
        if request.sampling.num_logprobs >= 0:
            rows.flags[row] |= RowFlag.LOGPROBS
        held = seq.receipt.num_pages if seq.receipt is not None else 0
        if held:
            self._take_prefix(seq, held)
        if state is SeqState.PREFILLING:
            self.begin_stage(seq, held * self.config.page_tokens)
        self.note(state.value, seq, row)
        return row

    def begin_stage(self, seq: Sequence, held: int) -> None:
        """Compute what comes after `held` tokens, which the row's pages hold, and what must be replayed before it."""
        rows, row = self.rows, seq.row
        hits = seq.floors.hits if seq.floors is not None else ()
        seq.stage = next_stage(self.chains.rule, hits, held, int(rows.goal[row]))
        rows.committed[row] = seq.stage.start
        rows.scheduled[row] = seq.stage.start
        rows.stage_end[row] = seq.stage.end
        self.activate(seq)

    def activate(self, seq: Sequence, next_token: int = -1) -> None:
        """The row's steps begin: its deadline counts here from now on, and the runner has to set it up."""
        self.rows.deadline[seq.row] = seq.deadline
        self.fresh_rows[seq.row] = next_token

    def close_row(self, seq: Sequence, *, keep_tokens: bool = False) -> None:
        """Give back row, own pages (by fence) and locks. With `keep_tokens` the known ids stay with the sequence."""
        rows, row = self.rows, seq.row
        if keep_tokens:
            seq.tokens = rows.tokens[row, : int(rows.known[row])].copy()
        own = rows.pages(row, start=int(rows.tree_pages[row]))
        self.pool.free(own, self.launched, owner=seq.id)
        self.unlock(seq)
        self.fresh_rows.pop(row, None)
        rows.release(row, self.launched)
        seq.row = -1

    def held_rows(self) -> list[HeldRow]:
        """Return what every living sequence holds, for the audit."""
        held: list[HeldRow] = []
        for seq in self.sequences.values():
            if seq.row >= 0:
                held.append(HeldRow(owner=seq.id, pages=self.rows.pages(seq.row), receipt=seq.receipt))
            elif seq.receipt is not None:
                held.append(HeldRow(owner=seq.id, pages=np.zeros(0, np.int32), receipt=seq.receipt))
        return held

    # Prefix.

    def lock_prefix(self, seq: Sequence) -> int:
        """Lock the longest cached prefix that the sequence can be computed behind; returns its pages."""
        return self._lock(seq, self.chains.find(seq))

    def lock_landing_prefix(self, seq: Sequence) -> int:
        """Lock the longest cached prefix that a sequence from elsewhere need not be sent; returns its pages."""
        return self._lock(seq, self.chains.find_landing(seq))

    def shrink_prefix(self, seq: Sequence, num_pages: int) -> None:
        """Give back the locks behind the first `num_pages` pages of a booked sequence: they will be sent after all."""
        old, rows, row = seq.receipt, self.rows, seq.row
        assert old is not None
        assert rows.num_pages[row] == rows.tree_pages[row] == old.num_pages
        seq.receipt = self.tree.lock(self.tree.match(seq.hashes[:num_pages]), num_pages)
        self.tree.unlock(old, fence=self.launched)
        rows.num_pages[row] = rows.tree_pages[row] = num_pages
        rows.sent_pages[row] = min(int(rows.sent_pages[row]), num_pages)
        self.promised_pages += old.num_pages - num_pages

    def _lock(self, seq: Sequence, prefix: Prefix) -> int:
        self.chains.adopt(seq, prefix.hits)
        seq.prefix = prefix
        seq.receipt = self.tree.lock(self.tree.match(seq.hashes[: prefix.num_pages]), prefix.num_pages)
        return prefix.num_pages

    def unlock(self, seq: Sequence) -> None:
        """Give the sequence's locks back."""
        if seq.receipt is not None:
            self.tree.unlock(seq.receipt, fence=self.launched)
            seq.receipt = None

    def cached_tokens(self, seq: Sequence) -> int:
        """Return how many tokens of a waiting sequence are cached now, without locking them."""
        return self.chains.find(seq).num_pages * self.config.page_tokens

    def uncached_tokens(self, seq: Sequence) -> int:
        """Return how many tokens of a waiting sequence would have to be computed now, replayed ones included."""
        cached = self.cached_tokens(seq)
        return len(seq.tokens) - (self.chains.rule.encoder_floor(cached) if cached else 0)

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """Give the full pages of the first `num_tokens` committed tokens to the tree; the row's table follows."""
        full = num_tokens // self.config.page_tokens
        rows, row = self.rows, seq.row
        if not self.reuses_pages or seq.receipt is None or full <= seq.receipt.num_pages:
            return
        self.chains.extend(seq, rows.tokens[row], full)
        self.chains.name(seq, rows.tokens[row], full)
        own = rows.pages(row, end=full)
        published = self.tree.publish(seq.id, seq.hashes[:full], own, seq.receipt)
        seq.receipt = published.receipt
        start = published.start
        rows.page_table[row, start:full] = published.canonical_pages
        rows.tree_pages[row] = published.receipt.num_pages
        if len(published.duplicate_pages):
            # The runner's mirror names the duplicates until the next plan tells it otherwise.
            rows.sent_pages[row] = min(int(rows.sent_pages[row]), start)
            self.pool.free(published.duplicate_pages, self.launched, owner=seq.id)

    def _take_prefix(self, seq: Sequence, num_pages: int) -> None:
        rows, row = self.rows, seq.row
        rows.append_pages(row, self.tree.match(seq.hashes[:num_pages]).pages)
        rows.tree_pages[row] = num_pages
        rows.committed[row] = rows.scheduled[row] = num_pages * self.config.page_tokens

    # Room.

    @property
    def num_free_or_evictable(self) -> int:
        """Pages that nobody holds and no launched step keeps behind a fence."""
        return self.pool.num_free + self.tree.num_evictable

    def make_room(self, count: int) -> bool:
        """Evict so that `count` pages become free; True if they are free now. Pages behind a fence count as coming."""
        lack = count - self.pool.num_free - self.pool.num_fenced
        if lack > 0 and self.tree.num_evictable:
            self.pool.free(self.tree.evict(lack), self.launched)
        return self.pool.num_free >= count

    def retire(self, step: int) -> None:
        """Results of all steps up to `step` are processed: what waited for them is free."""
        self.retired = step
        self.pool.retire(step)
        self.rows.retire(step)

    def audit(self) -> list[str]:
        """Check rows, pool, tree and the ledger of promises against each other."""
        found = self.rows.audit() + self.tree.audit(self.held_rows())
        promised = 0
        for seq in self.sequences.values():
            if seq.row >= 0 and self.rows.seq[seq.row] != seq.id:
                found.append(f"S1 sequence {seq.id} believes in row {seq.row}, which belongs to another")
            if seq.state in (SeqState.BOOKED, SeqState.LANDING):
                promised += seq.booked_pages - int(self.rows.num_pages[seq.row])
            if seq.row >= 0 and _ROW_STATES.get(seq.state) != self.rows.state[seq.row]:
                found.append(f"S2 sequence {seq.id} is {seq.state.value}, its row is not")
        if promised != self.promised_pages:
            found.append(f"S3 {self.promised_pages} pages are counted as promised, bookings sum to {promised}")
        return found
