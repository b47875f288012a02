"""Places one attempt: hashes its pages in the namespace of each fingerprint and asks the placer.

Knows no streams and no retries. Event loop's thread only.
"""

from dataclasses import dataclass, field

import msgspec

from core.clock import Clock
from core.hashing import PageHasher, event_hash, image_pages
from core.ids import PageHash
from core.stream import PrefillTarget, Started
from core.worker import Registration
from gateway.directory import Directory, Member
from gateway.generation import Prompt
from gateway.placer import HashedPages, Pair, Placer, Query
from gateway.prefix_index import PrefixIndex
from gateway.resume import Output
from gateway.routing.job import Choice, RoutingRules, Shortage
from gateway.routing.picker import Picker

MAX_HASHERS = 64
MAX_ROOTS = 1024
"""Keyed roots of chains kept, by namespace, tenant and salt."""


@dataclass(slots=True)
class Chain:
    """Page hashes of one sequence in one namespace, extended as it grows."""

    page_tokens: int
    hashes: list[PageHash] = field(default_factory=list)
    events: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Work:
    """What is to be placed, over all attempts: written by its owner, read here."""

    prompt: Prompt
    output: Output
    chains: dict[bytes, Chain] = field(default_factory=dict)
    avoid_decode: set[Member] = field(default_factory=set)
    avoid_prefill: set[Member] = field(default_factory=set)

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV an attempt needs."""
        return len(self.prompt.token_ids) + len(self.output.tokens)


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """A pair, and what the choice was based on."""

    prefill: Member | None
    decode: Member
    choice: Choice
    page_hashes: tuple[PageHash, ...]
    uncached_tokens: int
    reason: str = ""


class Router:
    """Knows the directory and the cluster secret."""

    def __init__(
        self,
        *,
        directory: Directory,
        index: PrefixIndex,
        secret: bytes,
        rules: RoutingRules,
        picker: Picker,
        clock: Clock,
    ) -> None:
        self._directory = directory
        self._secret = secret
        self._hashers: dict[bytes, PageHasher] = {}
        self._roots: dict[tuple[bytes, str, str], PageHash] = {}
        self.placer = Placer(directory=directory, index=index, rules=rules, picker=picker, clock=clock)

    def place(self, work: Work) -> Placed | Shortage:
        """Choose a pair, workers to avoid only if there is no other."""
        num_tokens = work.num_tokens
        found = self.placer.place(self._query(work))
        if not isinstance(found, Pair):
            return found
        return Placed(
            prefill=found.prefill,
            decode=found.decode,
            choice=found.choice,
            page_hashes=tuple(self._chain(work, found.decode.registration, num_tokens).hashes),
            uncached_tokens=max(1, num_tokens - found.choice.matched_prefill),
            reason=found.reason,
        )

    def place_prefill(self, work: Work, decode: Member) -> Member | None:
        """Choose another prefill worker for a request that stays where it is; None: there is none."""
        return self.placer.place_prefill(self._query(work), decode)

    def handed_over(self, started: Started, placed: Placed, num_tokens: int, landing_s: float) -> None:
        """Learn from a finished hand-over, landed so long after the prompt was computed, what moving costs."""
        if placed.prefill is not None:
            self.placer.link.observe(
                tokens=num_tokens - placed.choice.matched_decode,
                num_bytes=started.bytes_pulled,
                seconds=landing_s,
                far=placed.prefill.registration.domain != placed.decode.registration.domain,
            )

    def _query(self, work: Work) -> Query:
        prompt, num_tokens = work.prompt, work.num_tokens
        return Query(
            request_id=f"{prompt.request_id}-{prompt.sampling.sample_index}",
            model=prompt.model,
            num_tokens=num_tokens,
            max_output=max(1, prompt.stop.max_tokens - len(work.output.tokens)),
            pages=[
                HashedPages(group.fingerprint, group.page_tokens, self._chain(work, group, num_tokens).events)
                for group in self._directory.groups(prompt.model)
            ],
            session=session_of(prompt),
            is_first=not work.output.tokens,
            avoid_prefill=work.avoid_prefill,
            avoid_decode=work.avoid_decode,
        )

    def _chain(self, work: Work, registration: Registration, num_tokens: int) -> Chain:
        chain = work.chains.get(registration.namespace)
        if chain is None:
            chain = work.chains[registration.namespace] = Chain(registration.page_tokens)
        size = registration.page_tokens
        done = len(chain.hashes)
        if num_tokens // size > done:
            hasher = self._hasher(registration)
            prompt = work.prompt
            tokens = (*prompt.token_ids, *work.output.tokens) if work.output.tokens else prompt.token_ids
            previous = chain.hashes[-1] if done else self._root(hasher, registration.namespace, prompt)
            spans = [(image.start, image.end, image.digest) for image in prompt.images]
            images = image_pages(spans, size, done, num_tokens // size - done) if spans else ()
            new = hasher.extend(previous, tokens[done * size :] if done else tokens, images)
            chain.hashes += new
            chain.events += map(event_hash, new)
        return chain

    def _root(self, hasher: PageHasher, namespace: bytes, prompt: Prompt) -> PageHash:
        name = namespace, prompt.tenant, prompt.cache_salt
        root = self._roots.get(name)
        if root is None:
            if len(self._roots) >= MAX_ROOTS:
                self._roots.clear()
            root = self._roots[name] = hasher.root(prompt.tenant, prompt.cache_salt)
        return root

    def _hasher(self, registration: Registration) -> PageHasher:
        hasher = self._hashers.get(registration.namespace)
        if hasher is None:
            if len(self._hashers) >= MAX_HASHERS:
                self._hashers.clear()
            hasher = PageHasher(self._secret, registration.namespace, registration.page_tokens)
            self._hashers[registration.namespace] = hasher
        return hasher


def target_of(member: Member | None) -> PrefillTarget | None:
    """Return a prefill worker's address as the decode worker needs it."""
    if member is None:
        return None
    told = member.registration
    return PrefillTarget(worker_id=told.worker_id, address=told.address, incarnation=told.incarnation)


def session_of(prompt: Prompt) -> str:
    """Return the name of the prompt's session, "" for none: tenants cannot join each other's, however they name them."""
    return f"{prompt.tenant}/{prompt.session}" if prompt.session else ""
