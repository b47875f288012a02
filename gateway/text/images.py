"""Images of a request: from data: URLs to the pixels that the model sees, within limits.

Sizes are decided by `core.image_plan`; here the picture is decoded, turned upright, shrunk or enlarged into its plan
and centred on grey. Blocking; run on a thread. Knows no prompt.
"""

import base64
import binascii
import io
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from PIL import Image, ImageOps, UnidentifiedImageError

from core.errors import BadRequest
from core.hashing import image_digest
from core.image_plan import ImageRules, plan_image
from core.request import MmItem
from gateway.text.chat import ImagePart
from gateway.text.remote_images import RemoteImages, fetch_image

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_BROKEN = (UnidentifiedImageError, OSError, SyntaxError, ValueError, EOFError)
"""What Pillow raises for files that are no images, or broken ones."""
_GREY = (127, 127, 127)
_LOW_DETAIL_SIDE = 512
"""A picture sent with `detail: low` counts as at most this long."""


class ImageLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `api.images` of the gateway's configuration."""

    max_images: Annotated[int, Meta(ge=0)] = 64
    """Images of one request."""
    max_pixels: Annotated[int, Meta(ge=1)] = 50_000_000
    """Of one picture as sent; larger ones are refused before they are decoded."""
    max_bytes: Annotated[int, Meta(ge=1)] = 40 << 20
    """Of all images of a request as the model sees them: they travel with it, in parts (`core.rpc.pixels`)."""
    remote: RemoteImages = RemoteImages()


def decode_url(part: ImagePart, remote: RemoteImages) -> bytes:
    """Return the file in a data: URL, or at an allowed address; raises `BadRequest`."""
    head, comma, body = part.url.partition(",")
    scheme, colon, kind = head.partition(":")
    if scheme.lower() != "data" or not colon:
        return fetch_image(part, remote)
    kind = kind.lower()
    if not comma or not kind.endswith(";base64") or not kind.startswith("image/"):
        raise BadRequest(f"`{part.where}` must read data:image/...;base64,...", param=part.where)
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest(f"`{part.where}` is not valid base64", param=part.where) from None


def load_image(part: ImagePart, rules: ImageRules, limits: ImageLimits) -> MmItem:
    """Return the image at position 0 of no prompt yet: `end` is its number of positions. Raises `BadRequest`."""
    data = decode_url(part, limits.remote)
    try:
        return _load(data, part, rules, limits)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        # The second only where warnings are errors.
        raise BadRequest(f"`{part.where}` has too many pixels: {error}", param=part.where) from error
    except _BROKEN as error:
        raise BadRequest(
            f"`{part.where}` is not an image that can be read; send PNG, JPEG, WebP or GIF", param=part.where
        ) from error


def _load(data: bytes, part: ImagePart, rules: ImageRules, limits: ImageLimits) -> MmItem:
    with Image.open(io.BytesIO(data), formats=_FORMATS) as file:
        if file.width * file.height > limits.max_pixels:
            raise BadRequest(
                f"`{part.where}` has {file.width}x{file.height} pixels; at most {limits.max_pixels} are taken",
                param=part.where,
            )
        picture = _rgb(ImageOps.exif_transpose(file))
    width, height = picture.size
    if part.detail == "low" and max(width, height) > _LOW_DETAIL_SIDE:
        scale = _LOW_DETAIL_SIDE / max(width, height)
        width, height = max(1, int(width * scale)), max(1, int(height * scale))
    plan = plan_image(width, height, rules)
    shown = ImageOps.pad(picture, (plan.width, plan.height), method=Image.Resampling.BICUBIC, color=_GREY)
    pixels = shown.tobytes()
    return MmItem(
        digest=image_digest(plan.height, plan.width, pixels),
        start=0,
        end=plan.num_tokens,
        height=plan.height,
        width=plan.width,
        pixels=pixels,
    )


def _rgb(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith("I"):
        # 16 bits of grey: Pillow's own conversion would clip them.
        grey = np.asarray(picture).astype(np.uint32) >> 8
        return Image.fromarray(np.minimum(grey, 255).astype(np.uint8)).convert("RGB")
    return picture.convert("RGB")
