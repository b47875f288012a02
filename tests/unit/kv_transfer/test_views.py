"""Copies of records between regions: whatever their sizes and order, the result is that of one copy after the other."""

import numpy as np
import pytest

from kv_transfer.views import copy_records, copy_slices

POOL = 1 << 20
SIZES = {
    "small and equal": [4096] * 200,
    "too few to be worth it": [64] * 5,
    "odd": [528] * 300 + [68] * 40,
    "large": [100_000] * 6,
    "mixed": [512] * 9 + [40_000] * 3 + [8192] * 20 + [1, 2, 3] + [512] * 10,
    "one": [4096],
    "the whole region": [POOL],
    "none": [],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("read_only", [False, True])
def test_records_are_copied_as_one_after_the_other(sizes, read_only):
    rng = np.random.default_rng(len(sizes))
    nbytes = np.array(sizes, np.int64)
    source = rng.integers(0, 256, POOL, np.uint8)
    source.flags.writeable = not read_only
    places = nbytes.cumsum() - nbytes
    order = rng.permutation(len(sizes))
    # Targets are disjoint, sources are anywhere.
    targets, nbytes = places[order], nbytes[order]
    sources = np.array([rng.integers(0, POOL - n + 1) for n in nbytes], np.int64)
    expected, found = np.zeros(POOL, np.uint8), np.zeros(POOL, np.uint8)
    copy_slices(expected, source, zip(targets.tolist(), sources.tolist(), nbytes.tolist(), strict=True))
    copy_records(found, source, targets, sources, nbytes)
    assert np.array_equal(found, expected)
