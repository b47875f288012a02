"""What a kernel's check and its measurement have in common: inputs by size, a comparison, the bytes it must move."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from engine.kernels.reference.formats import decode_q4, decode_q4kv, decode_q8

Args = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Inputs:
    """One call of an op."""

    args: Args
    written: tuple[int, ...] = ()
    """Arguments that the op writes into; they come poisoned."""
    least_bytes: int = 0
    """Every input read once, every output written once."""
    flops: float = 0.0
    keywords: dict[str, object] = field(default_factory=dict)

    def copied(self) -> "Inputs":
        """Return the same call with outputs of its own."""
        args = tuple(same_strides(a) if i in self.written else a for i, a in enumerate(self.args))
        return replace(self, args=args)


def same_strides(tensor: object) -> torch.Tensor:
    """Return a copy with the strides of a view into wider records."""
    assert isinstance(tensor, torch.Tensor)
    base = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8, device=tensor.device)
    base.untyped_storage().copy_(tensor.untyped_storage())
    typed = base.view(tensor.dtype)
    return typed.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


Check = Callable[[torch.Tensor, torch.Tensor], str | None]
"""Compares (kernel's, reference's); returns what is wrong."""


@dataclass(frozen=True, slots=True)
class Case:
    """One op at its sizes."""

    op: str
    make: Callable[[torch.Generator, dict[str, int]], Inputs]
    checks: tuple[Check, ...]
    """One per output: what the op returns, then what it writes into."""
    small: tuple[dict[str, int], ...]
    """For the interpreter, with the edges of shapes."""
    large: tuple[dict[str, int], ...]
    """Of the real model, measured."""
    compiled: tuple[dict[str, int], ...] = ()
    """Sizes whose launches are compiled; empty: the first large one."""
    by_chip: bool = False
    """Chips with tensor memory have another body, which the interpreter checks, too."""
    consistent: Callable[[tuple[torch.Tensor, ...]], str | None] = field(default=lambda _: None)
    """A property of the kernel's outputs alone."""


def exact(got: torch.Tensor, want: torch.Tensor) -> str | None:
    """Every bit."""
    if torch.equal(got, want):
        return None
    wrong = (got != want).reshape(len(got), -1).any(1).nonzero().flatten()
    return f"{len(wrong)} of {len(got)} rows differ, first {wrong[:4].tolist()}"


def close(relative: float, absolute: float = 0.0, share: float = 0.0) -> Check:
    """|got - want| <= absolute + relative * |want|, except for a share of the values."""

    def check(got: torch.Tensor, want: torch.Tensor) -> str | None:
        got, want = got.double(), want.double()
        if not bool(torch.isfinite(got).all()):
            return f"{int((~torch.isfinite(got)).sum())} values are not finite"
        wrong = (got - want).abs() > absolute + relative * want.abs()
        if float(wrong.double().mean()) <= share:
            return None
        worst = ((got - want).abs() - relative * want.abs()).max()
        return f"{int(wrong.sum())} of {wrong.numel()} values differ, at most by {float(worst):.3g} beyond the relative part"

    return check


NEAR_BF16 = close(2.0**-7, 1e-6)
"""One bfloat16 rounding apart: the order of float32 sums may move a value over a rounding border."""


def few_bytes(share: float) -> Check:
    """Codes that differ only where a value sat on a border: at most a share of the bytes, and rows never poisoned."""

    def check(got: torch.Tensor, want: torch.Tensor) -> str | None:
        differ = float((got != want).double().mean())
        return None if differ <= share else f"{differ:.2%} of the bytes differ, allowed are {share:.2%}"

    return check


def packed(width: int, bits: int, group: int, share: float = 0.01) -> Check:
    """Rows of packed values, `share` of them one rounding step apart at most; what is poisoned in both is not read."""

    def check(got: torch.Tensor, want: torch.Tensor) -> str | None:
        untouched = (want == POISON).all(-1)
        if not bool((got[untouched] == POISON).all()):
            return "a row was written that the reference leaves alone"
        a, b = (_unpacked(rows[~untouched], width, bits, group) for rows in (got, want))
        if not bool(torch.isfinite(a).all()):
            return "values are not finite"
        most = b.abs().unflatten(-1, (-1, group)).amax(-1, keepdim=True).expand(-1, -1, group).flatten(-2)
        step = 0.125 * b.abs() + most / 448 if bits == 8 else most * 0.51
        differ = a != b
        if float(differ.double().mean()) > share:
            return f"{float(differ.double().mean()):.2%} of the values differ, allowed are {share:.2%}"
        return None if bool(((a - b).abs() <= step).all()) else "a value is more than one step off"

    return check


POISON = 0xFF


def _unpacked(rows: torch.Tensor, width: int, bits: int, group: int) -> torch.Tensor:
    codes, scales = rows[:, : width * bits // 8], rows[:, width * bits // 8 :]
    decode = decode_q8 if bits == 8 else decode_q4kv if group == 16 else decode_q4
    return decode(codes, scales.contiguous())


def poisoned(*shape: int, stride: int | None = None, device: torch.device) -> torch.Tensor:
    """Return uint8 [n, rows, width] of 0xff (NaN in e4m3 and e8m0), records `stride` bytes apart."""
    records, rows, width = shape
    pitch = rows * width if stride is None else stride
    base = torch.full((records, pitch), POISON, dtype=torch.uint8, device=device)
    return base[:, : rows * width].unflatten(1, (rows, width))


def size_of(*tensors: torch.Tensor) -> int:
    """Return the bytes of tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def turns(generator: torch.Generator, rows: int, pairs: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines float32 [rows, pairs] of random angles."""
    angle = torch.rand(rows, pairs, generator=generator, device=generator.device) * 6.2831853
    return angle.cos(), angle.sin()


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return normal numbers whose rows have sizes over a few powers of two, so that scales differ."""
    x = torch.randn(*shape, generator=generator, device=generator.device)
    spread = torch.randint(-3, 4, (*shape[:-1], 1), generator=generator, device=generator.device)
    return (x * 2.0**spread).to(dtype)
