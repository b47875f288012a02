"""The soak of KV transfer in the length that CI allows; `make soak` runs ten times as many requests over every transport."""

import pytest

from tests.fakes.soak import soak

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_200_requests_with_a_kill_and_a_stall_are_all_right_and_leave_nothing_held(transport, tmp_path):
    """Negative controls: `test_chaos.py` (the verdict sees planted faults; spoilt KV changes the text)."""
    result = soak(tmp_path, transport, 200)
    assert result["faults"] == []
    assert len(result["events"]) == 2
    assert result["left_early"] > 5
    counts = result["counts_of_living_workers"]
    assert counts["transfer_pulls_committed"] > 80, "hardly anything was handed over"
    lost = counts["worker_need_prefill_total"] + counts["worker_recovered_here_total"]
    assert lost > 0, "the kill met no hand-over"
