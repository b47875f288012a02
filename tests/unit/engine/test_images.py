import msgspec
import pytest

from core.errors import BadRequest, ConfigError
from core.image_plan import ImageRules
from engine.config import EngineConfig, check_image_room
from engine.images import ImageFacts, check_images, spans_of
from tests.fakes.engine_rig import Facts, request_of
from tests.fakes.vision import image, prompt_with

TOKEN = 90
RULES = ImageRules(patch=2, downsample=2, max_tokens=12, min_pixels=16)
FACTS = ImageFacts(token_id=TOKEN, rules=RULES)


def picture(seed, height=4, width=4):
    return image(seed, height, width, rules=RULES)


def request_with(*parts):
    ids, items = prompt_with(parts, TOKEN)
    return request_of(ids, 5, mm_items=items)


def changed(request, **fields):
    """The request with its first image changed."""
    first, *rest = request.mm_items
    return msgspec.structs.replace(request, mm_items=(msgspec.structs.replace(first, **fields), *rest))


def refused(request, message, facts=FACTS):
    with pytest.raises(BadRequest, match=message):
        check_images(request, facts)


def test_images_one_behind_the_other_are_taken():
    request = request_with([1, 2], picture(1), picture(2, 8, 4), [3], picture(3))
    check_images(request, FACTS)
    assert spans_of(request) == [(2, 6), (6, 12), (13, 17)]
    check_images(request_with([1, 2, 3]), FACTS)


def test_a_model_without_images_refuses_them_and_leaves_text_alone():
    refused(request_with([1], picture(1)), "takes no images", facts=None)
    check_images(request_with([1, TOKEN]), None)


def test_a_place_of_another_length_than_the_size_gives_is_refused():
    refused(changed(request_with([1], picture(1), [2]), end=6), "takes 4 tokens, not 5")
    refused(changed(request_with([1], picture(1)), width=8), "takes 5 tokens, not 4")


def test_pixels_that_are_missing_or_too_few_are_refused():
    refused(changed(request_with([1], picture(1)), pixels=b""), "0 bytes of pixels, not 48")


def test_sizes_that_are_no_patches_or_too_large_are_refused():
    refused(changed(request_with([1], picture(1)), width=3), "multiple of 2")
    refused(request_with([1], picture(1, 20, 12)), "22 tokens is more than 12")


def test_a_digest_of_another_length_is_refused():
    refused(changed(request_with([1], picture(1)), digest=b"short"), "digest has 5 bytes")


def test_overlaps_and_places_outside_the_prompt_are_refused():
    request = request_with([1], picture(1), picture(2))
    first, second = request.mm_items
    refused(msgspec.structs.replace(request, mm_items=(second, first)), "overlaps")
    refused(msgspec.structs.replace(request, num_prompt_tokens=7), "leaves the prompt")
    refused(changed(request, start=-1, end=3), "overlaps or leaves")


def test_an_image_on_other_tokens_and_its_token_without_an_image_are_refused():
    request = request_with([1], picture(1), [2])
    refused(msgspec.structs.replace(request, token_ids=(1, 2, *request.token_ids[2:])), "lies on other tokens")
    refused(msgspec.structs.replace(request, mm_items=()), "stands for an image")
    refused(msgspec.structs.replace(request, token_ids=(TOKEN, *request.token_ids[1:])), "stands for an image")


def test_the_largest_image_must_fit_into_a_chunk_unless_images_are_off():
    facts = Facts()
    facts.images = FACTS
    check_image_room(EngineConfig(page_tokens=4, chunk_tokens=12), facts)
    with pytest.raises(ConfigError, match="chunk_tokens = 11 is smaller than an image, which may have 12"):
        check_image_room(EngineConfig(page_tokens=4, chunk_tokens=11), facts)
    check_image_room(EngineConfig(page_tokens=4, chunk_tokens=11, images=False), facts)
