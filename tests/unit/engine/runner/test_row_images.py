import numpy as np
import torch

from core.request import SamplingParams
from engine.plan import RowInit
from engine.runner.row_images import EncodedImages, RowImages
from tests.fakes.vision import image, random_pixels

torch.set_num_threads(1)
HIDDEN = 3


class CountingEncoder:
    """Rows that name the image and the place inside it."""

    def __init__(self):
        self.seen = []

    def encode(self, pixels):
        self.seen.append(tuple(pixels.shape))
        length = image(0, pixels.shape[0], pixels.shape[1]).end
        first = float(pixels[0, 0, 0])
        return torch.tensor([[first, i, 0.5] for i in range(length)], dtype=torch.float64)


def name_of(seed, height=84, width=84):
    return float(random_pixels(seed, height, width)[0, 0, 0])


def rows_with(max_bytes=1 << 20):
    encoder = CountingEncoder()
    encoded = EncodedImages(encoder, max_bytes)
    return RowImages(encoded), encoder, encoded


def init(row, *images):
    return RowInit(
        row=row, generation=0, sampling=SamplingParams(), token_ids=b"", num_prompt_tokens=1, min_tokens=0,
        masked_until_min=(), images=images,
    )  # fmt: skip


def step(images, **chunks):
    """Rows r<i>=(start, length) of one step -> {index into the step's tokens: row}."""
    rows = np.array([int(name[1:]) for name in chunks], np.int32)
    lengths = [length for _, length in chunks.values()]
    q_start = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    found = images.of_step(rows, q_start, np.array([start for start, _ in chunks.values()], np.int32))
    return {} if found is None else dict(zip(found.at.tolist(), found.rows.tolist(), strict=True))


def test_rows_of_an_image_come_by_position_whatever_the_chunks():
    images, encoder, _ = rows_with()
    images.set_row(init(2, image(1, 84, 84, start=5), image(2, 84, 126, start=13)))
    first, second = name_of(1), name_of(2, 84, 126)
    assert step(images, r2=(0, 5)) == {}
    assert encoder.seen == []
    assert step(images, r0=(7, 2), r2=(5, 3)) == {2 + i: [first, i, 0.5] for i in range(3)}
    rest = step(images, r2=(8, 20))
    assert rest == {i: [first, 3 + i, 0.5] for i in range(5)} | {5 + i: [second, i, 0.5] for i in range(10)}
    assert step(images, r2=(28, 4)) == {}
    assert len(encoder.seen) == 2


def test_a_chunk_that_begins_inside_an_image_gets_the_rest_of_it():
    images, _, _ = rows_with()
    images.set_row(init(0, image(1, 84, 84, start=4)))
    assert step(images, r0=(9, 6)) == {i: [name_of(1), 5 + i, 0.5] for i in range(3)}


def test_one_image_in_several_rows_is_encoded_once():
    images, encoder, _ = rows_with()
    for row in range(3):
        images.set_row(init(row, image(1, 84, 84), image(1, 84, 84, start=20)))
    found = step(images, r0=(0, 30), r1=(0, 30), r2=(0, 30))
    assert len(found) == 48
    assert len(encoder.seen) == 1


def test_a_row_that_begins_again_forgets_the_images_before():
    images, encoder, _ = rows_with()
    images.set_row(init(0, image(1, 84, 84)))
    images.set_row(init(0))
    assert step(images, r0=(0, 8)) == {}
    assert encoder.seen == []


def test_the_least_recently_used_are_forgotten_and_rows_keep_theirs():
    size = 8 * HIDDEN * 8
    images, encoder, encoded = rows_with(max_bytes=2 * size)
    images.set_row(init(0, image(1, 84, 84)))
    step(images, r0=(0, 4))
    for seed in (2, 1, 3):
        images.set_row(init(1, image(seed, 84, 84)))
        step(images, r1=(0, 8))
    assert encoded.num_bytes == 2 * size
    assert encoded.num_encoded == 3
    images.set_row(init(1, image(1, 84, 84)))  # used after 2, so it is still there
    step(images, r1=(0, 8))
    assert encoded.num_encoded == 3
    images.set_row(init(1, image(2, 84, 84)))
    step(images, r1=(0, 8))
    assert encoded.num_encoded == 4
    assert len(step(images, r0=(4, 4))) == 4
    assert len(encoder.seen) == 4


def test_an_image_that_is_larger_than_the_cache_is_encoded_for_its_row_alone():
    images, encoder, encoded = rows_with(max_bytes=10)
    images.set_row(init(0, image(1, 84, 84)))
    assert len(step(images, r0=(0, 4)) | step(images, r0=(4, 4))) == 4
    assert len(encoder.seen) == 1
    assert encoded.num_bytes == 0
