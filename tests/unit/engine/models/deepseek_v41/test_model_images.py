import functools

import numpy as np
import pytest
import torch

from engine.batch import ImageRows
from tests.fakes.deepseek_driver import Driver, reference, text, tiny_model
from tests.fakes.vision import image, prompt_with, tiny_encoder

torch.set_num_threads(1)


class ImageDriver(Driver):
    """A driver that splices the rows of images into every batch."""

    def __init__(self, *args, images, **how):
        super().__init__(*args, **how)
        self.images = images
        """Row -> {position: row of the image}."""

    def batch(self, chunks):
        batch = super().batch(chunks)
        at, rows = [], []
        for i, row in enumerate(chunks):
            for j in range(batch.q_start[i], batch.q_start[i + 1]):
                value = self.images.get(row, {}).get(int(batch.positions[j]))
                if value is not None:
                    at.append(j)
                    rows.append(value)
        if at:
            object.__setattr__(batch, "images", ImageRows(torch.tensor(at), torch.stack(rows)))
        return batch


@functools.cache
def shown():
    """(ids, {position: row}) of a prompt with two images."""
    ids, items = prompt_with([text(1, 7), image(1, 84, 84), text(2, 4), image(2, 84, 126), text(3, 6)])
    rows = {}
    for item in items:
        pixels = np.frombuffer(item.pixels, np.uint8).reshape(item.height, item.width, 3)
        for i, row in enumerate(tiny_encoder().encode(torch.from_numpy(pixels.copy()))):
            rows[item.start + i] = row
    return list(ids), rows


@functools.cache
def truth():
    """Logits [t, vocab] of the dense reference, which is told of images by flags and not by ids."""
    ids, rows = shown()
    model = reference()
    cache = model.new_cache()
    cache.extend(ids, [i in rows for i in range(len(ids))])
    dense = torch.stack([rows.get(i, torch.zeros(128, dtype=torch.float64)) for i in range(len(ids))])
    with torch.inference_mode():
        return model.forward(cache, 0, len(ids), image_rows=dense).logits


@pytest.mark.parametrize("sizes", [[35], [7, 8, 4, 10, 6], [9, 3, 12, 11]])
def test_batched_with_images_equals_the_reference_wherever_chunks_end(sizes):
    ids, rows = shown()
    driver = ImageDriver(tiny_model(), images={1: rows})
    got, start = [], 0
    for size in sizes:
        got.append(driver.step({1: ids[start : start + size]})[1])
        start += size
    assert start == len(ids)
    assert (torch.cat(got) - truth()).abs().max() < 1e-9


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_text_beside_an_image_is_the_text_alone(deterministic):
    ids, rows = shown()
    other = text(9, 12)
    model = tiny_model()
    alone = Driver(model, deterministic=deterministic).step({2: other})[2]
    together = ImageDriver(model, images={1: rows}, deterministic=deterministic).step({2: other, 1: ids})
    assert (together[2] - alone).abs().max() < 1e-9
    assert (together[1] - truth()).abs().max() < 1e-9
    if deterministic:
        assert torch.equal(together[2], alone)


def test_other_pixels_change_what_follows_and_nothing_before():
    ids, rows = shown()
    changed = rows | {9: rows[9] + 1}
    got = ImageDriver(tiny_model(), images={0: changed}).step({0: ids})[0]
    assert (got[:9] - truth()[:9]).abs().max() < 1e-9
    assert (got[-1] - truth()[-1]).abs().max() > 1e-6
