"""The images that rows still have to compute, and the rows of the model that stand for them, spliced by position.

An image is encoded once when its first position is computed, and what came out is kept for others with the same
digest as long as there is room. Executor thread only. Knows no model beyond its encoder.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from core.request import MmItem
from engine.batch import ImageRows
from engine.config import EngineConfig
from engine.models.model import ImageEncoder, ImageModel, Model
from engine.plan import RowInit

I32 = npt.NDArray[np.int32]


class EncodedImages:
    """Results of one encoder by digest, the least recently used forgotten first, within `max_bytes`."""

    def __init__(self, encoder: ImageEncoder, max_bytes: int) -> None:
        self._encoder = encoder
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self.num_bytes = 0
        self.num_encoded = 0

    def span(self, item: MmItem) -> torch.Tensor:
        """Return [item.end - item.start, d]; the tensor stays valid when it is forgotten here."""
        found = self._kept.get(item.digest)
        if found is not None:
            self._kept.move_to_end(item.digest)
            return found
        pixels = np.frombuffer(item.pixels, np.uint8).reshape(item.height, item.width, 3)
        span = self._encoder.encode(torch.from_numpy(pixels.copy()))
        assert span.shape[0] == item.end - item.start, "an image's place differs from what its encoder gives"
        self.num_encoded += 1
        if span.nbytes <= self._max_bytes:
            self._kept[item.digest] = span
            self.num_bytes += span.nbytes
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._kept.popitem(last=False)[1].nbytes
        return span


@dataclass(slots=True)
class _Pending:
    """An image of a row, encoded or not."""

    item: MmItem
    span: torch.Tensor | None = None


class RowImages:
    """Images by engine row."""

    def __init__(self, encoded: EncodedImages) -> None:
        self._encoded = encoded
        self._rows: dict[int, list[_Pending]] = {}

    def set_row(self, init: RowInit) -> None:
        """Begin a row; whatever an earlier owner left is forgotten."""
        self._rows.pop(init.row, None)
        if init.images:
            self._rows[init.row] = [_Pending(item) for item in init.images]

    def of_step(self, rows: I32, q_start: I32, seq_start: I32) -> ImageRows | None:
        """Return the rows of images among a step's tokens, None if there are none; arrays as in `ForwardBatch`."""
        if not self._rows:
            return None
        at: list[npt.NDArray[np.int64]] = []
        values: list[torch.Tensor] = []
        for i, row in enumerate(rows.tolist()):
            pending = self._rows.get(row)
            if pending is None:
                continue
            first, base = int(seq_start[i]), int(q_start[i])
            end = first + int(q_start[i + 1]) - base
            for image in pending:
                low, high = max(first, image.item.start), min(end, image.item.end)
                if low < high:
                    at.append(np.arange(base + low - first, base + high - first, dtype=np.int64))
                    values.append(self._span(image)[low - image.item.start : high - image.item.start])
            self._keep(row, [image for image in pending if image.item.end > end])
        if not at:
            return None
        return ImageRows(torch.from_numpy(np.concatenate(at)), torch.cat(values))

    def _span(self, image: _Pending) -> torch.Tensor:
        if image.span is None:
            image.span = self._encoded.span(image.item)
        return image.span

    def _keep(self, row: int, pending: Sequence[_Pending]) -> None:
        if pending:
            self._rows[row] = list(pending)
        else:
            del self._rows[row]


def row_images(model: Model, config: EngineConfig) -> RowImages | None:
    """Return what an executor needs for the images of a model; None if none are taken."""
    if not config.images or not isinstance(model, ImageModel) or model.image_encoder is None:
        return None
    return RowImages(EncodedImages(model.image_encoder, config.image_cache_bytes))
