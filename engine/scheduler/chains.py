"""The hash chains of sequences, and the longest cached prefix that each may build on.

A page's hash says what is in the page. Behind a hit whose windows are rebuilt by replay, pages come out a little
different from those of an undivided computation; their hashes go on from a mark that names the hit. So equal hashes
mean equal pages, a request that asks for exactness never meets an approximate page, and a request whose floors are
fixed finds pages of exactly its own kind. Scheduler thread only; knows no rows and no pool.
"""

from core.errors import BadRequest
from core.hashing import PageHasher, image_pages
from core.ids import PageHash
from core.request import Floors, GenerateRequest
from engine.cache.hit import ReuseRule
from engine.cache.plain_names import PlainNames
from engine.cache.prefix_tree import PrefixTree
from engine.sequence import I32, Sequence
from engine.stage import Prefix

Hits = tuple[int, ...]


class Chains:
    """Hashes of all sequences of one engine, under one reuse rule."""

    def __init__(
        self, rule: ReuseRule, hasher: PageHasher, tree: PrefixTree, names: PlainNames, *, caches: bool
    ) -> None:
        self.rule = rule
        self.caches = caches
        """False: nothing is ever reused, and nobody hashes."""
        self._hasher = hasher
        self._tree = tree
        self._names = names
        self._size = hasher.page_tokens

    # Floors.

    def check(self, request: GenerateRequest) -> None:
        """Raise `BadRequest` if the request's floors cannot be those of an attempt under this rule."""
        floors, rule = request.floors, self.rule
        if floors is None:
            return
        hits = floors.hits
        fits = hits == () or rule.replays
        fits &= all(a < b for a, b in zip((0, *hits), hits, strict=False))
        fits &= all(hit % self._size == 0 and rule.gains(hit) for hit in hits)
        fits &= not hits or hits[-1] < len(request.token_ids)
        fits &= floors.encoder_floor == (rule.encoder_floor(hits[-1]) if hits else 0)
        fits &= floors.decoder_floor in (0, rule.decoder_floor(request.num_prompt_tokens))
        if not fits:
            raise BadRequest("the request's replay floors were not made by this deployment", param="encoder_floor")

    def floors_of(self, request: GenerateRequest) -> Floors | None:
        """Return the floors of a request that came with some, or that must be exact; None: a hit decides them."""
        if request.sampling.prompt_logprobs:
            return Floors()
        return request.floors

    def choose(self, seq: Sequence) -> None:
        """Fix the floors of a sequence that is about to be computed behind its locked prefix, unless they are fixed."""
        if seq.floors is None:
            assert seq.prefix is not None
            hit = seq.prefix.num_pages * self._size
            hits = (*seq.prefix.hits, hit) if self.rule.replays and hit else ()
            seq.floors = Floors(
                encoder_floor=self.rule.encoder_floor(hit) if hits else 0,
                decoder_floor=self.rule.decoder_floor(seq.num_prompt),
                hits=hits,
            )
        self.adopt(seq, seq.floors.hits)

    # Hashes.

    def begin(self, seq: Sequence) -> None:
        """Give a new sequence its chain, taken from the request if the gateway hashed the same pages."""
        full = len(seq.tokens) // self._size
        if len(seq.request.page_hashes) == full:
            seq.hashes = seq.chains[()] = list(seq.request.page_hashes)
        elif self.caches:
            seq.hashes = self._chain(seq, (), seq.tokens, full)

    def adopt(self, seq: Sequence, hits: Hits) -> None:
        """Make the chain behind `hits` the sequence's own: its pages will be computed, or were, behind these."""
        if self.caches:
            seq.hashes = self._chain(seq, hits, seq.tokens, len(seq.tokens) // self._size)

    def extend(self, seq: Sequence, tokens: I32, num_pages: int) -> None:
        """Hash pages of the sequence's own chain up to `num_pages`."""
        have = len(seq.hashes)
        if num_pages > have:
            hits = seq.floors.hits if seq.floors is not None else ()
            self._grow(seq, hits, seq.hashes, tokens, num_pages)

    def name(self, seq: Sequence, tokens: I32, num_pages: int) -> None:
        """The sequence's first pages are about to be published: say what pages of these tokens are called."""
        if seq.floors is not None and seq.floors.hits:
            first = seq.floors.hits[0] // self._size
            plain = self._chain(seq, (), tokens, num_pages)
            self._names.introduce(seq.hashes[first:num_pages], plain[first:num_pages])

    def _chain(self, seq: Sequence, hits: Hits, tokens: I32, num_pages: int) -> list[PageHash]:
        """Return at least `num_pages` hashes behind `hits`; kept with the sequence, whose tokens only grow."""
        chain = seq.chains.get(hits)
        if chain is None:
            border = hits[-1] // self._size if hits else 0
            chain = seq.chains[hits] = self._chain(seq, hits[:-1], tokens, border)[:border] if hits else []
        self._grow(seq, hits, chain, tokens, num_pages)
        return chain

    def _grow(self, seq: Sequence, hits: Hits, chain: list[PageHash], tokens: I32, num_pages: int) -> None:
        have, size = len(chain), self._size
        if num_pages <= have:
            return
        request = seq.request
        if not have:
            previous = self._hasher.root(request.tenant, request.cache_salt, request.lora)
        elif hits and have * size == hits[-1]:
            previous = self._hasher.behind_hit(chain[-1], self.rule.encoder_floor(hits[-1]))
        else:
            previous = chain[-1]
        images = self._images(request, have, num_pages - have)
        chain.extend(self._hasher.extend(previous, tokens[have * size : num_pages * size].tolist(), images))

    def _images(self, request: GenerateRequest, first: int, count: int) -> tuple[tuple[bytes, ...], ...]:
        """Return the digests of the images on pages [first, first + count)."""
        return image_pages([(item.start, item.end, item.digest) for item in request.mm_items], self._size, first, count)

    # Prefixes.

    def find(self, seq: Sequence) -> Prefix:
        """Return what a sequence that is about to be computed may build on. The last known token is never part of it."""
        limit = self._limit(seq)
        if seq.floors is not None and self.rule.replays:
            hits = seq.floors.hits
            held = self._held(self._chain(seq, hits, seq.tokens, limit), limit) * self._size if limit else 0
            fixed = tuple(hit for hit in hits if hit <= held)
            # Rows behind the last of these are computed again: their windows are needed, and are not cached.
            return Prefix(fixed[:-1], fixed[-1] // self._size if fixed else 0)
        if not limit:
            return Prefix((), 0)
        if not self.rule.replays:
            return Prefix((), self._held(self._chain(seq, (), seq.tokens, limit), limit))
        found = self._search(seq, (), limit)
        return found if self.rule.gains(found.num_pages * self._size) else Prefix((), 0)

    def find_landing(self, seq: Sequence) -> Prefix:
        """Return what a sequence whose KV comes from elsewhere need not be sent.

        Windows come with it, so any length will do. Before the source has said what it computed behind, only pages of
        an undivided computation are offered.
        """
        limit = self._limit(seq)
        hits = seq.floors.hits if seq.floors is not None else ()
        if not limit:
            return Prefix(hits, 0)
        return Prefix(hits, self._held(self._chain(seq, hits, seq.tokens, limit), limit))

    def continuations(self, seq: Sequence, num_pages: int) -> tuple[PageHash, ...]:
        """Return the hashes that page `num_pages` has when it is computed on, or behind a hit of that length."""
        if num_pages >= len(seq.hashes):
            return ()
        hit = num_pages * self._size
        if seq.floors is not None or not self.rule.replays or not self.rule.gains(hit):
            return (seq.hashes[num_pages],)
        previous = self._hasher.behind_hit(seq.hashes[num_pages - 1], self.rule.encoder_floor(hit))
        page = seq.tokens[hit : hit + self._size].tolist()
        return (seq.hashes[num_pages], *self._hasher.extend(previous, page, self._images(seq.request, num_pages, 1)))

    def _search(self, seq: Sequence, hits: Hits, limit: int) -> Prefix:
        """Return the longest cached chain whose first marks are `hits`; of equal ones that with the fewest marks."""
        chain = self._chain(seq, hits, seq.tokens, limit)
        best = Prefix(hits, self._held(chain, limit))
        for border in self._tree.borders(chain[: best.num_pages]):
            tokens = border * self._size
            marked = (*hits, tokens)
            if border >= limit or tokens <= max(hits, default=0) or not self.rule.gains(tokens):
                continue
            if self._held(self._chain(seq, marked, seq.tokens, border + 1), border + 1) <= border:
                del seq.chains[marked]
                continue
            found = self._search(seq, marked, limit)
            if found.num_pages > best.num_pages:
                best = found
        return best

    def _held(self, chain: list[PageHash], limit: int) -> int:
        return self._tree.match(chain[:limit]).longest_on_device(limit)

    def _limit(self, seq: Sequence) -> int:
        return (len(seq.tokens) - 1) // self._size if self.caches else 0
