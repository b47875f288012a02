import base64
import io

import numpy as np
import pytest
from PIL import Image

from core.errors import BadRequest
from core.image_plan import ImageRules, plan_image
from gateway.text.chat import ImagePart
from gateway.text.images import ImageLimits, load_image
from tests.fakes.deepseek import data_url, picture

RULES = ImageRules(max_tokens=40, min_pixels=84 * 84)
LIMITS = ImageLimits(max_pixels=1_000_000)


def load(data: bytes, kind: str = "png", detail: str = "auto", limits: ImageLimits = LIMITS):
    return load_image(ImagePart(data_url(data, kind), detail, "here"), RULES, limits)


def array(item) -> np.ndarray:
    return np.frombuffer(item.pixels, np.uint8).reshape(item.height, item.width, 3)


def save(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def test_a_picture_of_a_fitting_size_is_shown_pixel_by_pixel():
    noise = np.random.default_rng(1).integers(0, 256, (84, 126, 3), dtype=np.uint8)
    item = load(save(Image.fromarray(noise)))
    assert (item.height, item.width, item.end) == (84, 126, 2 * 4 + 2)
    assert np.array_equal(array(item), noise)


@pytest.mark.parametrize(("width", "height"), [(100, 60), (7, 300), (500, 500), (1, 1), (333, 80)])
def test_other_sizes_become_their_plan(width, height):
    item = load(picture(width, height))
    plan = plan_image(width, height, RULES)
    assert (item.width, item.height, item.end) == (plan.width, plan.height, plan.num_tokens)
    assert len(item.pixels) == plan.num_bytes


def test_what_the_picture_leaves_free_is_grey_on_both_sides():
    item = load(save(Image.new("RGB", (300, 100), (255, 0, 0))))
    rows = array(item)
    is_grey = (rows == 127).all(axis=(1, 2))
    is_red = (rows == (255, 0, 0)).all(axis=(1, 2))
    assert is_red.any()
    assert is_grey[0] == is_grey[-1]
    assert abs(int(is_grey[: len(rows) // 2].sum()) - int(is_grey[len(rows) // 2 :].sum())) <= 1


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_the_usual_formats_are_read(kind):
    assert load(picture(90, 90, kind=kind), kind.lower()).pixels


@pytest.mark.parametrize("mode", ["L", "P", "1", "RGBA", "LA", "CMYK", "I;16"])
def test_every_colour_mode_becomes_three_channels(mode):
    if mode == "I;16":
        data = save(Image.fromarray(np.full((84, 84), 0x8000, np.uint16)))
        assert np.abs(array(load(data)).astype(int) - 128).max() <= 1
        return
    kind = "JPEG" if mode == "CMYK" else "PNG"
    assert array(load(save(Image.new("RGB", (84, 84), (200, 200, 200)).convert(mode), kind))).shape == (84, 84, 3)


def test_a_photo_taken_sideways_is_turned_upright():
    image = Image.new("RGB", (168, 84), (0, 0, 0))
    image.paste((255, 255, 255), (0, 0, 84, 84))
    exif = Image.Exif()
    exif[0x0112] = 6
    item = load(save(image, exif=exif))
    assert item.height > item.width
    assert array(item)[5, 40, 0] == 255
    assert array(item)[-5, 40, 0] == 0


def test_low_detail_counts_as_a_small_picture():
    rules = ImageRules(max_tokens=1024, min_pixels=0)
    part = data_url(picture(1000, 500))
    low, high = (load_image(ImagePart(part, detail, "w"), rules, LIMITS) for detail in ("low", "high"))
    assert (low.width, low.height) == (518, 266)
    assert high.width == 1008


def test_equal_pictures_have_equal_digests_and_others_do_not():
    same = load(picture(100, 100))
    assert load(picture(100, 100, kind="WEBP")).digest != same.digest
    assert load(picture(100, 100)).digest == same.digest
    assert load(picture(100, 100, seed=1)).digest != same.digest
    assert len(same.digest) == 32


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://example.com/cat.png", "data: URLs only"),
        ("file:///etc/passwd", "data: URLs only"),
        ("/etc/passwd", "data: URLs only"),
        ("data:text/plain;base64,AAAA", "data:image"),
        ("data:image/png,AAAA", "data:image"),
        ("data:image/png;base64", "data:image"),
        ("data:image/png;base64,%%%", "base64"),
        ("data:image/png;base64,é", "base64"),
        ("data:image/png;base64,", "cannot|be read|can be read"),
        ("data:image/png;base64," + base64.b64encode(b"GIF89a not really").decode(), "can be read"),
        ("data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode(), "can be read"),
        ("data:image/tiff;base64," + base64.b64encode(picture(9, 9, kind="TIFF")).decode(), "can be read"),
    ],
)
def test_what_is_no_image_in_the_request_is_refused_with_its_place(url, words):
    with pytest.raises(BadRequest, match=words) as caught:
        load_image(ImagePart(url, "auto", "messages[0].content[1].image_url"), RULES, LIMITS)
    assert caught.value.param == "messages[0].content[1].image_url"


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_truncated_file_is_refused(kind, share):
    data = picture(90, 90, kind=kind)
    with pytest.raises(BadRequest, match="can be read"):
        load(data[: int(len(data) * share)], kind.lower())


def test_too_many_pixels_are_refused_before_they_are_decoded():
    bomb = save(Image.new("1", (20_000, 20_000)))
    assert len(bomb) < 100_000
    with pytest.raises(BadRequest, match="too many pixels"):
        load(bomb)
    with pytest.raises(BadRequest, match="1001x1000 pixels; at most 1000000"):
        load(save(Image.new("1", (1001, 1000))))
