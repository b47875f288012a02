import pytest

from gateway.debug_why import SHOWN, Decisions
from gateway.http.errors import HttpFault
from gateway.leases import Leases
from gateway.pages import build_pages
from tests.unit.gateway.test_router import Rig, hashes, store, work


@pytest.fixture
def rig():
    rig = Rig()
    for name in ("p1", "p2", "d1"):
        rig.add(name)
    return rig


def test_a_decision_is_shown_with_the_costs_of_every_candidate(rig):
    store(rig, rig.directory.find("p2"), hashes())
    asked = work()
    placed = rig.place(asked)
    (found,) = rig.router.placer.decisions.why(str(asked.prompt.request_id))
    assert (found["prefill"], found["decode"], found["reason"]) == ("p2", "d1", "prefix")
    assert found["predicted_wait_s"] == pytest.approx(placed.choice.wait_s, abs=1e-6)
    rows = {row["worker"]: row for row in found["prefill_candidates"]}
    assert set(rows) == {"p1", "p2", "d1"}
    assert rows["p2"]["matched"] == 80 and rows["p1"]["matched"] == 0
    assert rows["p2"]["total_s"] < rows["p1"]["total_s"]
    assert [row["worker"] for row in found["decode_candidates"]] == ["d1"]


def test_it_is_kept_after_the_workers_are_gone_and_forgotten_in_order(rig):
    decisions = Decisions(kept=2)
    placed = rig.place(work())
    for name in ("a-0", "b-0", "b-1"):
        decisions.note(name, placed.choice, placed.reason, 83, rig.directory)
    for member in list(rig.directory):
        rig.directory.deregister(member)
    assert decisions.why("a") == []
    assert [one["prefill"] for one in decisions.why("b")] == [placed.prefill.worker_id] * 2


def test_an_answer_is_bounded(rig):
    for number in range(3 * SHOWN):
        rig.add(f"p-{number}")
    asked = work()
    rig.place(asked)
    (found,) = rig.router.placer.decisions.why(str(asked.prompt.request_id))
    assert len(found["prefill_candidates"]) == SHOWN


def test_the_page_says_what_is_missing(rig):
    page = build_pages(dict, Leases(rig.clock), rig.router.placer.decisions)["/debug/why"]
    with pytest.raises(HttpFault) as missing:
        page({})
    assert missing.value.status == 400
    with pytest.raises(HttpFault) as unknown:
        page({"request_id": "nobody"})
    assert unknown.value.status == 404
    asked = work()
    rig.place(asked)
    assert b'"decode":"d1"' in page({"request_id": str(asked.prompt.request_id)}).body
