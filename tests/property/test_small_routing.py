"""Routing in plain numbers decides exactly as routing over arrays: same pair, same predictions, same dice."""

import random

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.fleet import MODE_AUTO, MODE_LOCAL, MODE_REMOTE, Fleet
from gateway.routing import small
from gateway.routing.calibration import LinkCosts
from gateway.routing.job import Choice, CostTable, Job, RoutingRules
from gateway.routing.pairs import PREDICTING, choose_by_arrays, choose_pair
from gateway.routing.picker import Picker

NOW = 100.0
seconds = st.one_of(st.just(0.0), st.floats(1e-6, 5.0))
tokens = st.integers(0, 5000)
likely = st.sampled_from([True, True, True, False])


@st.composite
def fleets(draw):
    fleet = Fleet.empty(small.LARGEST)
    for slot in range(draw(st.integers(0, small.LARGEST))):
        facts = {
            "used": True,
            "ready": draw(likely),
            "probing": not draw(likely),
            "lease_until": NOW + draw(st.sampled_from([-1.0, 0.0, 5.0, 5.0])),
            "open_until": NOW + draw(st.sampled_from([-1.0, -1.0, 0.0, 1.0])),
            "model": draw(st.sampled_from([1, 1, 1, 2])),
            "fingerprint": draw(st.sampled_from([1, 1, 1, 2])),
            "domain": draw(st.integers(1, 2)),
            "transports": draw(st.sampled_from([0, 2, 6, 4])),
            "mode": draw(st.sampled_from([MODE_LOCAL, MODE_REMOTE, MODE_REMOTE, MODE_AUTO])),
            "key": draw(st.integers(0, 2**32 - 1)),
            "page_tokens": draw(st.sampled_from([0, 16, 64])),
            "max_tokens": draw(st.sampled_from([100, 4000, 100_000])),
            "replay_tokens": draw(st.sampled_from([0, 0, 128])),
            "num_pages": draw(st.integers(1, 500)),
            "rows": draw(st.integers(0, 8)),
            "pages_free": draw(st.integers(0, 300)),
            "rate": draw(st.sampled_from([0.0, 1500.0, 9000.0])),
            "foreign_tokens": draw(tokens),
            "foreign_requests": draw(st.integers(0, 5)),
            "own_requests": draw(st.integers(0, 5)),
            "head_since": NOW - draw(seconds),
        }
        facts |= {name: draw(seconds) for name in ("base_s", "square_s", "step_s", "own_s", "head_s", "recent_s")}
        facts["token_s"] = draw(st.sampled_from([0.0, 1e-4, 3e-3]))
        facts["prefill"] = draw(st.booleans())
        facts["decode"] = not facts["prefill"]
        for name, value in facts.items():
            getattr(fleet, name)[slot] = value
    return fleet


slots = st.frozensets(st.integers(-1, small.LARGEST), max_size=3)


@st.composite
def jobs(draw):
    num_tokens = draw(st.integers(1, 5000))
    matched = draw(st.lists(st.integers(0, num_tokens), min_size=small.LARGEST, max_size=small.LARGEST))
    return Job(
        model=1,
        num_tokens=num_tokens,
        max_output=draw(st.integers(1, 500)),
        matched=np.array(matched if draw(st.booleans()) else [0] * small.LARGEST, np.int64),
        exclude_prefill=draw(slots),
        exclude_decode=draw(slots),
        session=draw(st.sampled_from([0, 0, 5 | 1 << 32])),
        continuing=draw(st.floats(0, 1)),
        link=LinkCosts(draw(st.sampled_from([0.0, 70_000.0])), 1e-9, 4e-9),
        homes=draw(st.dictionaries(st.integers(-1, small.LARGEST - 1), st.floats(0, 1e5), max_size=4)),
        cache_share=draw(st.floats(0.1, 2)),
    )


rules = st.builds(
    RoutingRules,
    policy=st.sampled_from(PREDICTING),
    quadratic_s=st.sampled_from([0.0, 1e-8]),
    max_waiting_requests=st.sampled_from([0, 2, 1024]),
    local_fallback=st.booleans(),
    tie_share=st.sampled_from([0.0, 0.02, 1.0]),
)


def told(choice):
    """Everything a placement says, arrays and lists alike."""
    if not isinstance(choice, Choice):
        return choice
    plain = {name: getattr(choice, name) for name in Choice.__struct_fields__ if name != "table"}
    table = {name: np.asarray(getattr(choice.table, name)).tolist() for name in CostTable.__struct_fields__}
    return plain, table


@settings(max_examples=100, deadline=None)
@given(fleets(), jobs(), rules, st.integers(0, 2**32))
def test_plain_numbers_decide_as_arrays_do(fleet, job, options, seed):
    plain, arrays = Picker(random.Random(seed)), Picker(random.Random(seed))
    assert told(small.choose_pair(fleet, job, options, plain, now=NOW)) == told(
        choose_by_arrays(fleet, job, options, arrays, now=NOW)
    )
    assert plain.random.random() == arrays.random.random()


def test_a_fleet_that_has_outgrown_them_or_needs_a_shortlist_goes_by_arrays(monkeypatch):
    asked = []
    monkeypatch.setattr(small, "choose_pair", lambda *_, **__: asked.append(1))
    job = Job(model=1, num_tokens=10, max_output=1, matched=np.zeros(small.LARGEST, np.int64))
    options, picker = RoutingRules(), Picker(random.Random(1))
    choose_pair(Fleet.empty(small.LARGEST), job, options, picker, now=NOW)
    assert asked == [1]
    choose_pair(Fleet.empty(small.LARGEST), job, msgspec.structs.replace(options, shortlist=4), picker, now=NOW)
    large = msgspec.structs.replace(job, matched=np.zeros(2 * small.LARGEST, np.int64))
    choose_pair(Fleet.empty(2 * small.LARGEST), large, options, picker, now=NOW)
    assert asked == [1]
