"""Bytes of one cache row: a window row, a compressed entry, an index key; element codes first, then their scales.

`unpack(pack(x))` is the quantizer's rounding of x, exactly. Knows no page and no ring.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.models.deepseek_v41.config import V41Config
from engine.models.deepseek_v41.formats import pack_nibbles, unpack_nibbles
from engine.models.deepseek_v41.quantize import Q4, Q8, Q4Kv, Quantizer


class RowFormat(Protocol):
    """One kind of row."""

    @property
    def width(self) -> int:
        """Values per row."""
        ...

    @property
    def row_bytes(self) -> int:
        """Bytes per row."""
        ...

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Return uint8 [..., row_bytes] of finite values [..., width]."""
        ...

    def unpack(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return values [..., width] of uint8 [..., row_bytes]; exact in float32, float64 and bfloat16."""
        ...


@dataclass(frozen=True, slots=True)
class EightBitRow:
    """`width` e4m3 bytes, then one e8m0 per 32: 528 bytes for 512 values."""

    width: int
    quantizer: Quantizer

    @property
    def row_bytes(self) -> int:
        return self.width + self.width // self.quantizer.group

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.quantizer.encode(values), dim=-1)

    def unpack(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        codes, scales = rows[..., : self.width].contiguous(), rows[..., self.width :].contiguous()
        return self.quantizer.decode(codes, scales).to(dtype)


@dataclass(frozen=True, slots=True)
class FourBitRow:
    """`width` / 2 bytes of e2m1 pairs, then the scales: 288 bytes for an entry of 512, 68 for an index key of 128."""

    width: int
    quantizer: Quantizer

    @property
    def row_bytes(self) -> int:
        return self.width // 2 + self.width // self.quantizer.group

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        codes, scales = self.quantizer.encode(values)
        return torch.cat((pack_nibbles(codes), scales), dim=-1)

    def unpack(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        half = self.width // 2
        return self.quantizer.decode(unpack_nibbles(rows[..., :half]), rows[..., half:].contiguous()).to(dtype)


@dataclass(frozen=True, slots=True)
class MixedRow:
    """V4's row: e4m3 for the plain dimensions, bfloat16 for the rotary ones, e8m0 per 64, a pad to 8 bytes: 584."""

    width: int
    rope_dim: int
    quantizer: Quantizer

    @property
    def row_bytes(self) -> int:
        return (self._plain + 2 * self.rope_dim + self._plain // self.quantizer.group + 7) // 8 * 8

    @property
    def _plain(self) -> int:
        return self.width - self.rope_dim

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        codes, scales = self.quantizer.encode(values[..., : self._plain])
        rope = values[..., self._plain :].to(torch.bfloat16).contiguous().view(torch.uint8)
        row = torch.cat((codes, rope, scales), dim=-1)
        return torch.nn.functional.pad(row, (0, self.row_bytes - row.shape[-1]))

    def unpack(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        end = self._plain + 2 * self.rope_dim
        scales = rows[..., end : end + self._plain // self.quantizer.group].contiguous()
        plain = self.quantizer.decode(rows[..., : self._plain].contiguous(), scales).to(dtype)
        # A copy, because a view as bfloat16 needs an even storage offset.
        rope = rows[..., self._plain : end].clone(memory_format=torch.contiguous_format)
        return torch.cat((plain, rope.view(torch.bfloat16).to(dtype)), dim=-1)


@dataclass(frozen=True, slots=True)
class RowFormats:
    """The rows of one model's caches."""

    window: RowFormat
    entry: RowFormat
    """Compressed entries ("main")."""
    index: RowFormat


def row_formats(config: V41Config) -> RowFormats:
    """Return the formats that the checkpoint was trained for."""
    index = FourBitRow(config.index.head_dim, Q4(32))
    if config.is_v4:
        plain = config.head_dim - config.rope_dim
        # V4's groups of 64 fit its own sizes; smaller test models have fewer plain dimensions.
        mixed = MixedRow(config.head_dim, config.rope_dim, Q8(64 if plain % 64 == 0 else 16))
        return RowFormats(window=mixed, entry=mixed, index=index)
    window = EightBitRow(config.head_dim, Q8(32))
    entry = FourBitRow(config.head_dim, Q4Kv(16)) if config.quant.fp4_sparse_kv else window
    return RowFormats(window=window, entry=entry, index=index)
