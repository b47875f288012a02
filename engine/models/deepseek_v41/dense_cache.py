"""What the dense reference remembers of one sequence: every layer's rows by position, in plain floats.

A rollback only moves the length: later rows overwrite, and nobody reads behind it. Rows that were never written are
NaN, so that reading one shows in every result. Knows no model.
"""

import torch

from engine.models.deepseek_v41.config import V41Config


class PositionRows:
    """A table of rows by position that grows as it is written."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._rows = torch.zeros(0, *shape, dtype=dtype)

    def write(self, start: int, rows: torch.Tensor) -> None:
        """Put rows [n, *shape] at positions start..start + n - 1."""
        stop = start + rows.shape[0]
        self._reserve(stop)
        self._rows[start:stop] = rows

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return rows [stop - start, *shape]; NaN where nothing was written."""
        self._reserve(stop)
        return self._rows[start:stop]

    def forget(self, start: int, stop: int) -> None:
        """Make positions start..stop - 1 as if never written."""
        self.read(start, stop).fill_(torch.nan)

    def _reserve(self, size: int) -> None:
        missing = size - self._rows.shape[0]
        if missing > 0:
            missing = max(missing, self._rows.shape[0])
            self._rows = torch.cat((self._rows, self._rows.new_full((missing, *self._rows.shape[1:]), torch.nan)))


class DenseCache:
    """State of one sequence. `length` tokens are in it; `ids` may know more (prompt tokens yet to run)."""

    def __init__(self, config: V41Config, pending_widths: dict[int, int], dtype: torch.dtype) -> None:
        """`pending_widths`: per owner of entries with m > 1, values per half of a pending row."""
        count = config.num_layers
        self.length = 0
        self.ids: list[int] = []
        self.is_image: list[bool] = []
        self.windows = [PositionRows((config.head_dim,), dtype) for _ in range(count + len(config.stages))]
        """Per backbone layer, then per draft stage."""
        owners = [plan.index for plan in config.kv_owners]
        self.entries = {i: PositionRows((config.head_dim,), dtype) for i in owners}
        self.index_keys = {i: PositionRows((config.index.head_dim,), dtype) for i in owners}
        self.pending = {i: PositionRows((2, width), dtype) for i, width in pending_widths.items()}
        self.key_pending = {i: PositionRows((2, 2 * config.index.head_dim), dtype) for i in pending_widths}
        """V4: pending rows of index keys."""

    def extend(self, ids: list[int], is_image: list[bool] | None = None) -> None:
        """Tell ids behind those that are known."""
        self.ids.extend(ids)
        self.is_image.extend([False] * len(ids) if is_image is None else is_image)

    def rewind(self, length: int) -> None:
        """Drop the tokens from position `length` on: ids and length, no rows."""
        self.length = min(self.length, length)
        del self.ids[length:]
        del self.is_image[length:]
