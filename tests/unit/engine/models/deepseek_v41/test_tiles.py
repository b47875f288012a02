import pytest
import torch

from engine.models.deepseek_v41.tiles import FIXED_ROWS, Tiles


def test_fixed_tiles_always_have_one_shape():
    shapes, x = [], torch.arange(96.0).view(48, 2)

    def double(rows):
        shapes.append(len(x[rows]))
        return 2 * x[rows], x[rows].sum(1)

    doubled, sums = Tiles(fixed=True).run(48, double)
    assert shapes == [FIXED_ROWS] * 3
    assert torch.equal(doubled, 2 * x)
    assert torch.equal(sums, x.sum(1))


def test_free_tiles_take_everything_that_memory_allows():
    sizes = []

    def note(rows):
        sizes.append(rows.stop - rows.start)
        return (torch.zeros(sizes[-1]),)

    tiles = Tiles(fixed=False)
    assert len(tiles.run(100, note)[0]) == 100
    assert sizes == [100]
    assert len(tiles.run(1100, note)[0]) == 1100
    assert max(sizes) <= 512


def test_rows_that_are_not_padded_are_our_own_mistake():
    assert Tiles(fixed=True).padded(17) == 32
    assert Tiles(fixed=False).padded(17) == 17
    with pytest.raises(AssertionError):
        Tiles(fixed=True).run(17, lambda rows: (torch.zeros(17),))
