"""The dense reference of `v41-tiny` with random weights, built once per process, and short ways to run it."""

from functools import cache

import torch

from engine.models.deepseek_v41.arithmetic import arithmetic_of
from engine.models.deepseek_v41.parse import parse_config
from engine.models.deepseek_v41.presets import tiny_config
from engine.models.deepseek_v41.random_weights import random_weights
from engine.models.deepseek_v41.reference import Reference

SEED = 7
WINDOW, ENCODER_LAYERS, DECODER_LAYERS, DRAFTS = 8, 8, 6, 5
"""Sizes of `v41-tiny` that bounds are made of."""


def token_map(vocab_size=512):
    """Return the compressed ids of the tiny model: id mod 300."""
    return torch.arange(vocab_size) % 300


@cache
def tiny():
    return parse_config(tiny_config(1024))


@cache
def tiny_weights(dtype=torch.float64):
    return random_weights(tiny(), SEED, dtype)


@cache
def tiny_reference(*, quantized=True, use_candidates=True):
    """Return the reference in float64; `quantized` turns all fake quantization on or off."""
    arithmetic = arithmetic_of(tiny(), activations=quantized, caches=quantized)
    return Reference(tiny(), tiny_weights(), arithmetic, token_map(), use_candidates=use_candidates)


@cache
def prompt(length, seed=0):
    """Return fixed random token ids below the special ones."""
    return tuple(torch.randint(3, 500, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def started(reference, ids):
    """Return a cache that knows `ids` and has run none of them."""
    cache = reference.new_cache()
    cache.extend(list(ids))
    return cache


def run(reference, cache, sizes, rule=None, start=0):
    """Run chunks of the given sizes one after the other; return the results."""
    results = []
    for size in sizes:
        results.append(reference.forward(cache, start, start + size, rule))
        start += size
    return results


def readable_rows(cache, config, first_window_row, first_decoder_row=0):
    """Return everything that a later token may read of a cache, by name."""
    length, rows = cache.length, {}
    for i, window in enumerate(cache.windows):
        floor = first_window_row if i < config.decoder_start else max(first_window_row, first_decoder_row)
        # A backbone row reads window - 1 rows behind it; a draft block reads a whole window.
        reach = config.window if i >= config.num_layers else config.window - 1
        rows[f"window {i}"] = window.read(max(floor, length - reach), length)
    for i, entries in cache.entries.items():
        m = config.layers[i].m
        rows[f"entries {i}"] = entries.read(0, length // m)
        rows[f"index keys {i}"] = cache.index_keys[i].read(0, length // m)
    for i, pending in cache.pending.items():
        rows[f"pending {i}"] = pending.read(length - length % config.layers[i].m, length)
    return rows


def largest_difference(left, right):
    """Return the largest difference of two dicts of tensors of equal shapes; NaN counts as infinite."""
    assert left.keys() == right.keys()
    worst = 0.0
    for name, rows in left.items():
        assert rows.shape == right[name].shape, name
        if rows.numel():
            worst = max(worst, float((rows - right[name]).abs().nan_to_num(nan=torch.inf).max()))
    return worst
