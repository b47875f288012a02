import math
import random

import deepseek_recipe
import pytest

from core.errors import BadRequest, ConfigError
from core.image_plan import ImageRules, Spot, plan_image, plan_size, read_rules

PUBLISHED = ImageRules()
TINY = ImageRules(max_tokens=40, min_pixels=84 * 84)


def official_tokens(width: int, height: int) -> int:
    image = deepseek_recipe.ImageInfo(b"", width, height)
    return deepseek_recipe.MultiModalData([image]).image_token_adjustment() + 1


def sizes(number: int, seed: int):
    rng = random.Random(seed)
    for index in range(number):
        if index % 2:
            yield rng.randint(1, 6000), rng.randint(1, 6000)
        else:
            yield int(math.exp(rng.uniform(0, 10))), int(math.exp(rng.uniform(0, 10)))


def test_token_counts_are_those_of_the_published_package_for_sizes_of_every_shape():
    for width, height in (*sizes(4000, 1), (1, 1), (93, 1), (29, 13), (263, 323), (1, 22000), (8219, 1)):
        assert plan_image(width, height, PUBLISHED).num_tokens == official_tokens(width, height), (width, height)


@pytest.mark.parametrize("rules", [PUBLISHED, TINY, ImageRules(max_tokens=4, min_pixels=0)])
def test_every_plan_is_whole_patches_within_the_budget_and_planning_it_again_changes_nothing(rules):
    for width, height in sizes(600, 2):
        plan = plan_image(width, height, rules)
        assert plan.width % rules.patch == plan.height % rules.patch == 0
        assert plan.num_tokens <= rules.max_tokens
        assert plan.num_bytes <= rules.max_pixel_bytes
        assert plan_image(plan.width, plan.height, rules) == plan == plan_size(plan.width, plan.height, rules)


def test_a_place_in_the_prompt_has_a_start_rows_that_end_and_an_end():
    plan = plan_image(84, 126, TINY)
    assert (plan.rows, plan.columns) == (3, 2)
    i, n = Spot.IMAGE, Spot.NEW_LINE
    assert plan.spots() == (Spot.START, i, i, n, i, i, n, i, i, n, Spot.END)
    assert len(plan.spots()) == plan.num_tokens


def test_known_sizes():
    plan = plan_image(4000, 3000, PUBLISHED)
    assert (plan.width, plan.height, plan.num_tokens) == (1512, 1134, 27 * 37 + 2)
    assert plan_image(1000, 1000, PUBLISHED).width == 1008
    assert plan_image(10, 10, PUBLISHED).width == 546


def test_rules_come_from_the_checkpoints_vision_config():
    rules = read_rules(
        {"patch_size": 14, "downsample_ratio": 3, "max_image_tokens": 40, "min_pixels": 7056, "hidden_size": 9}
    )
    assert rules == TINY
    with pytest.raises(ConfigError, match="vision_config is wrong"):
        read_rules({"patch_size": 0})


def test_a_shape_beyond_the_models_bound_is_refused():
    rules = ImageRules(max_ratio=10.0)
    assert plan_image(1000, 100, rules).num_tokens
    with pytest.raises(BadRequest, match="at most 10 times"):
        plan_image(1001, 100, rules)


def test_the_token_budget_wins_over_the_least_area():
    plan = plan_image(100, 100, ImageRules(max_tokens=4, min_pixels=10**6))
    assert (plan.width, plan.height, plan.num_tokens) == (42, 42, 4)


def test_pixels_that_are_no_whole_patches_are_refused():
    with pytest.raises(BadRequest, match="no multiple of 14"):
        plan_size(15, 14, TINY)
