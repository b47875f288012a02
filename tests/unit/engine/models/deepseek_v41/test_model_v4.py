"""V4 through the batched model: compressors of every layer with overlap, index keys of their own, all-entry layers."""

import itertools
from dataclasses import replace

import pytest
import torch

from engine.models.deepseek_v41.arithmetic import arithmetic_of
from engine.models.deepseek_v41.family import rules_of
from engine.models.deepseek_v41.layer_map import LayerPlan
from engine.models.deepseek_v41.model import DeepseekModel
from engine.models.deepseek_v41.parse import parse_config
from engine.models.deepseek_v41.random_weights import random_weights
from engine.models.deepseek_v41.reference import Reference
from engine.models.drafter import SpeculativeModel
from tests.fakes.deepseek_configs import v4_small_config
from tests.fakes.deepseek_driver import FACTS, Driver, Truth, text

PAGE = 128


@pytest.fixture(scope="module")
def config():
    return parse_config(v4_small_config())


@pytest.fixture(scope="module")
def model(config):
    weights = random_weights(config, 7, torch.float64)
    return DeepseekModel(config, weights, replace(FACTS, history_tokens=0), arithmetic_of(config))


@pytest.fixture(scope="module")
def truth(config):
    ids = text(1, 150)
    return ids, Truth(Reference(config, random_weights(config, 7, torch.float64), arithmetic_of(config))).run(ids)


def feed(driver, row, ids, sizes):
    ends = itertools.accumulate(sizes)
    return torch.cat([driver.step({row: ids[end - n : end]})[row] for n, end in zip(sizes, ends, strict=True)])


def driver_of(model, **settings):
    return Driver(model, num_rows=2, max_tokens=256, page_tokens=PAGE, **settings)


@pytest.mark.parametrize("sizes", [[150], [9, 1, 1, 3, 6, 107, 1, 1, 21], [126, 1, 1, 1, 21]])
def test_packed_pages_give_what_the_dense_reference_gives(model, truth, sizes):
    ids, whole = truth
    got = feed(driver_of(model), 1, ids, sizes)
    torch.testing.assert_close(got, whole, atol=1e-9, rtol=0)


def test_deterministic_logits_do_not_depend_on_batch_or_chunking(model, truth):
    ids, whole = truth
    alone = feed(driver_of(model, deterministic=True), 1, ids[:134], [134])
    driver = driver_of(model, deterministic=True)
    driver.step({0: text(4, 140), 1: ids[:127]}, wanted={0: 0, 1: 1})
    got = [driver.step({1: ids[127:128], 0: [5]})[1], driver.step({1: ids[128:134]})[1]]
    assert torch.equal(torch.cat(got), alone[127:])
    torch.testing.assert_close(alone, whole[:134], atol=1e-9, rtol=0)


def test_v4_has_no_draft_and_no_replay(model, config):
    assert not isinstance(model, SpeculativeModel)
    assert config.decoder_start == config.num_layers
    rule, decoder = rules_of(config, "exact")
    assert (rule.replays, decoder.mode) == (False, "off")


def test_the_map_of_the_test_has_every_kind_of_layer(config):
    kinds = {(layer.m, layer.overlap, layer.owns_index_keys, layer.hash_routed) for layer in config.layers}
    assert kinds == {(0, False, False, True), (4, True, True, True), (128, False, False, False), (4, True, True, False)}
    assert isinstance(config.layers[0], LayerPlan)
