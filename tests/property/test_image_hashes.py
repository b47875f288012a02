"""Gateway and engine name the pages of prompts with images alike, however the images lie on the pages."""

import random

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from core.clock import ManualClock
from core.hashing import PageHasher, image_digest, image_pages
from core.ids import RequestId
from core.request import MmItem
from core.worker import Role
from engine.cache.events import EventRecorder
from engine.cache.hit import PAGES
from engine.cache.page_pool import PagePool
from engine.cache.plain_names import PlainNames
from engine.cache.prefix_tree import PrefixTree
from engine.events import SeqId
from engine.scheduler.chains import Chains
from engine.sequence import SeqState, Sequence
from gateway.directory import Directory
from gateway.prefix_index import PrefixIndex
from gateway.resume import Output, build_request
from gateway.router import Router, Work
from gateway.routing.job import RoutingRules
from gateway.routing.picker import Picker
from tests.fakes.cluster import PAGE_TOKENS, SECRET, load, namespace, registration
from tests.fakes.sim_gateway import prompt

IMAGE_ID = 9


def prompt_with(texts: list[int], lengths: list[int]):
    """Text stretches with an image between each two: token ids, and the images at their places."""
    ids: list[int] = []
    images = []
    for index, length in enumerate(texts):
        ids += [10 + index] * length
        if index < len(lengths):
            pixels = bytes([index]) * 12
            images.append(
                MmItem(
                    digest=image_digest(2, 2, pixels),
                    start=len(ids),
                    end=len(ids) + lengths[index],
                    height=2,
                    width=2,
                    pixels=pixels,
                )
            )
            ids += [IMAGE_ID] * lengths[index]
    return ids or [10], tuple(images)


def build_router() -> Router:
    clock = ManualClock()
    directory = Directory(clock)
    index = PrefixIndex(expected_ttl_s=5.0)
    for name, role in (("p1", Role.PREFILL), ("d1", Role.DECODE)):
        member, _ = directory.join(registration(name, role))
        directory.heartbeat(member, load())
        index.add(member.slot, member.incarnation, 1000)
    return Router(
        directory=directory,
        index=index,
        secret=SECRET,
        rules=RoutingRules(),
        picker=Picker(random.Random(1)),
        clock=clock,
    )


def engine_hashes(request) -> list[bytes]:
    """What an engine calls the pages of a request when the gateway told it nothing."""
    hasher = PageHasher(SECRET, namespace(), PAGE_TOKENS)
    tree = PrefixTree(PagePool(8, PAGE_TOKENS))
    chains = Chains(PAGES, hasher, tree, PlainNames(EventRecorder()), caches=True)
    tokens = np.asarray(request.token_ids, np.int32)
    untold = msgspec.structs.replace(request, page_hashes=())
    seq = Sequence(SeqId(1), untold, 0.0, 1, False, SeqState.WAITING, tokens, [])
    chains.begin(seq)
    return seq.hashes


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 3 * PAGE_TOKENS), min_size=1, max_size=4),
    st.lists(st.integers(1, 2 * PAGE_TOKENS), max_size=3),
    st.integers(0, 2 * PAGE_TOKENS),
)
def test_gateway_and_engine_hash_alike_at_first_and_on_a_resume(texts, lengths, said):
    ids, images = prompt_with(texts, lengths)
    asked = prompt(tokens=ids, images=images)
    work = Work(asked, Output())
    router = build_router()
    for _ in range(2):
        placed = router.place(work)
        request = build_request(
            asked,
            request_id=RequestId("r"),
            attempt=0,
            output=work.output,
            page_hashes=placed.page_hashes,
            timeout_s=1.0,
            num_cached_tokens=-1,
        )
        assert request.mm_items == images
        assert list(placed.page_hashes) == engine_hashes(request)
        work.output.accept(0, [7] * said, ())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 40), st.integers(1, 60), st.integers(0, 40))
def test_exactly_the_pages_that_hold_a_position_of_an_image_name_it(before, length, after):
    size = 8
    ids = [1] * before + [IMAGE_ID] * length + [2] * after
    pages = len(ids) // size
    hasher = PageHasher(b"s", b"n", size)

    def chain(name: bytes) -> list[bytes]:
        spans = [(before, before + length, name)]
        return [image_pages(spans, size, page, 1)[0] for page in range(pages)]

    named = [bool(digests) for digests in chain(b"a")]
    assert named == [page * size < before + length and (page + 1) * size > before for page in range(pages)]
    one = hasher.extend(hasher.root(), ids, chain(b"a" * 32))
    other = hasher.extend(hasher.root(), ids, chain(b"b" * 32))
    equal = [a == b for a, b in zip(one, other, strict=True)]
    first = before // size
    assert equal == [page < first for page in range(pages)]
