"""How large an image is shown to the model, and what its place in the prompt looks like: pure arithmetic.

The one definition for gateway (resizes, writes placeholders) and engine (encodes, fills them). Sizes are pixels, a
*patch* is `patch` pixels square, a *cell* is `downsample` patches square and becomes one token. Knows no pixels.
"""

import enum
import math
from typing import Annotated

import msgspec
from msgspec import Meta

from core.errors import BadRequest, ConfigError

MAX_ROUNDS = 100
"""Fitting ends at a size that fits as it is; published sizes need at most a few rounds."""

_Count = Annotated[int, Meta(ge=1)]


class ImageRules(msgspec.Struct, frozen=True, kw_only=True):
    """The image budget of one model. Defaults are those of the published vision model."""

    patch: _Count = 14
    downsample: _Count = 3
    max_tokens: Annotated[int, Meta(ge=4)] = 1024
    """Of one image, its start, its end and the ends of its rows included."""
    min_pixels: Annotated[int, Meta(ge=0)] = 544 * 544
    """Smaller images are enlarged to about this area."""
    max_ratio: float | None = None
    """Bound on the longer side over the shorter one."""

    @property
    def cell(self) -> int:
        """Pixels per side of what becomes one token."""
        return self.patch * self.downsample

    @property
    def max_pixel_bytes(self) -> int:
        """Upper bound on the uint8 RGB bytes of one image."""
        return self.max_tokens * self.cell * self.cell * 3


class Spot(enum.IntEnum):
    """What one position of an image's place in the prompt stands for."""

    START = 0
    IMAGE = 1
    NEW_LINE = 2
    END = 3


class ImagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The size an image is brought to (multiples of the patch; what the picture leaves free is padding)."""

    width: int
    height: int
    rows: int
    """Token rows: cells, the last ones perhaps partly beyond the edge."""
    columns: int

    @property
    def num_tokens(self) -> int:
        """Positions in the prompt."""
        return self.rows * (self.columns + 1) + 2

    @property
    def num_bytes(self) -> int:
        """Bytes of the pixels: uint8 [height, width, 3]."""
        return self.height * self.width * 3

    def spots(self) -> tuple[Spot, ...]:
        """Return the meaning of each position in order; those of kind IMAGE take the encoder's rows in reading order."""
        row = (Spot.IMAGE,) * self.columns + (Spot.NEW_LINE,)
        return (Spot.START, *row * self.rows, Spot.END)


def read_rules(vision: dict[str, object]) -> ImageRules:
    """Return the rules that a checkpoint's `vision_config` states; raises `ConfigError`."""
    names = {
        "patch_size": "patch",
        "downsample_ratio": "downsample",
        "max_image_tokens": "max_tokens",
        "min_pixels": "min_pixels",
        "max_wh_ratio": "max_ratio",
    }
    found = {ours: vision[theirs] for theirs, ours in names.items() if theirs in vision}
    try:
        return msgspec.convert(found, ImageRules)
    except msgspec.ValidationError as error:
        raise ConfigError(f"vision_config is wrong: {error}") from error


def plan_size(width: int, height: int, rules: ImageRules) -> ImagePlan:
    """Return the plan for pixels that have this very size already; both sides must be multiples of the patch."""
    if min(width, height) < rules.patch or width % rules.patch or height % rules.patch:
        raise BadRequest(f"an image of {width}x{height} pixels is no multiple of {rules.patch}", param="mm_items")
    return ImagePlan(width=width, height=height, rows=-(-height // rules.cell), columns=-(-width // rules.cell))


def plan_image(width: int, height: int, rules: ImageRules) -> ImagePlan:
    """Return the size for a picture of `width` x `height` pixels (at least 1 each); raises `BadRequest`.

    One round enlarges to `min_pixels`, rounds up to whole patches and, if that is too many tokens, fits the picture
    into the largest grid of its shape. Rounds repeat on their own result until it stays.
    """
    if rules.max_ratio is not None and max(width, height) > rules.max_ratio * min(width, height):
        raise BadRequest(f"an image may be at most {rules.max_ratio:g} times as long as wide", param="messages")
    size = (width, height)
    for _ in range(MAX_ROUNDS):
        fitted = _fit(*size, rules)
        if fitted == size:
            plan = plan_size(*size, rules)
            if plan.num_tokens > rules.max_tokens:
                break
            return plan
        size = fitted
    raise BadRequest(f"an image of {width}x{height} pixels cannot be fitted into the model's budget", param="messages")


def _fit(width: int, height: int, rules: ImageRules) -> tuple[int, int]:
    patch, cell = rules.patch, rules.cell
    wide, high = width, height
    if width * height < rules.min_pixels:
        scale = math.sqrt(rules.min_pixels / (width * height))
        wide, high = int(width * scale), int(height * scale)
    wide, high = (max(patch, -(-side // patch) * patch) for side in (wide, high))
    if -(-high // cell) * (-(-wide // cell) + 1) + 2 <= rules.max_tokens:
        return wide, high
    columns, rows = _largest_grid(width / height, rules.max_tokens)
    scale = min(columns * cell / width, rows * cell / height)
    wide, high = (max(patch, int(side * scale) // patch * patch) for side in (width, height))
    return wide, high


def _largest_grid(ratio: float, max_tokens: int) -> tuple[int, int]:
    """Return (columns, rows) of the largest grid of the shape `ratio` = width / height whose tokens fit."""
    room = max_tokens - 2
    rows = (math.sqrt(1 + 4 * ratio * room) - 1) / (2 * ratio)
    if rows < 1:
        return room - 1, 1
    columns = int(rows * ratio)
    return (columns, int(rows)) if columns >= 1 else (1, room // 2)
