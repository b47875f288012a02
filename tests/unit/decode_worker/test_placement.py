"""Where prompts are computed."""

import pytest

from decode_worker.placement import PrefillMode, computes_here


def decide(mode, **changes):
    facts = {"has_target": True, "num_tokens": 1000, "prefix_tokens": 0, "threshold_tokens": 128} | changes
    return computes_here(mode, **facts)


def test_local_mode_never_asks_a_prefill_worker():
    assert decide(PrefillMode.LOCAL)


def test_remote_mode_uses_the_worker_that_the_gateway_named_even_for_short_prompts():
    assert not decide(PrefillMode.REMOTE, num_tokens=1)


@pytest.mark.parametrize("mode", list(PrefillMode))
def test_without_a_target_the_prompt_is_computed_here(mode):
    assert decide(mode, has_target=False)


def test_auto_mode_counts_only_uncached_tokens():
    assert decide(PrefillMode.AUTO, num_tokens=128)
    assert not decide(PrefillMode.AUTO, num_tokens=129)
    assert decide(PrefillMode.AUTO, num_tokens=1000, prefix_tokens=872)
    assert not decide(PrefillMode.AUTO, num_tokens=1000, prefix_tokens=871)
