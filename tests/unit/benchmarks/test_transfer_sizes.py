"""The fit that tells a request's fixed cost, and the sizes of the engine's own requests."""

import pytest

from benchmarks.transfer_sizes import engine_requests, fixed_cost


def test_a_fixed_cost_is_found_beside_the_time_of_the_bytes():
    seconds = {1 << power: 100e-6 + (1 << power) / 5e9 for power in range(19, 25)}
    found = fixed_cost(seconds)
    assert found == {"fixed_us": pytest.approx(100), "gb_per_s": pytest.approx(5), "worst_deviation": 0}
    seconds[1 << 20] *= 1.5
    assert fixed_cost(seconds)["worst_deviation"] > 0.1, "a time that fits no line must show"


def test_pulls_of_the_shipped_models_post_few_large_requests_of_large_records():
    rows = engine_requests()
    assert len(rows) == 9
    for row in rows.values():
        assert row["record_bytes"][0] >= 64 << 10
        assert row["requests"] * (32 << 20) < row["bytes_in_flight"] + (64 << 20), "cut smaller than needed"
