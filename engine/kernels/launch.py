# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
"""Kernels whose launches find their compiled code again without Triton's binder.

A step that is not recorded makes hundreds of launches, one by one, on the host. What Triton compiles for is a launch's
constants and options and, of every other argument, its type, whether it is 1 and whether 16 divides it (a pointer's
address): by that the compiled kernel of an earlier launch is found here, and started with addresses, which the driver need
not be asked about. The first launch of a kind is Triton's own.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

_I32, _I64 = 1 << 31, 1 << 63


class _Pointers(dict[torch.dtype, tuple[object, object]]):
    """By element: what Triton looks at of a tensor, by whether 16 divides its address."""

    def __missing__(self, dtype: torch.dtype) -> tuple[object, object]:
        self[dtype] = (dtype, False), (dtype, True)
        return self[dtype]


_pointers = _Pointers()


def _kind(value: object) -> object:
    """Return what Triton looks at of an argument of a launch."""
    if type(value) is int:
        return value == 1, value & 15 == 0, -_I32 <= value < _I32, value < _I64
    if isinstance(value, torch.Tensor):
        return _pointers[value.dtype][value.data_ptr() & 15 == 0]
    if isinstance(value, tuple):
        return tuple(map(_kind, value))
    return value if value is None else type(value)


def _kind_of_any_number(value: object) -> object:
    """As `_kind`, of a parameter that Triton was told not to specialize on: its integers differ by their width alone."""
    return (-_I32 <= value < _I32, value < _I64) if type(value) is int else _kind(value)


def _itself(value: object) -> object:
    return value


class Kernel(JITFunction):
    """A function of Triton that is launched: `kernel[grid](arguments, constants and options by name)`."""

    def __init__(self, fn: Callable[..., Any], **settings: Any) -> None:
        super().__init__(fn, **settings)
        self._found: dict[object, tuple[Any, tuple[object, ...]]] = {}
        self._kinds = tuple(
            _itself if p.is_constexpr else _kind_of_any_number if p.do_not_specialize else _kind for p in self.params
        )
        self._runtime = frozenset(p.name for p in self.params if not p.is_constexpr)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: object, **keywords: object) -> object:
        if not self._found:  # before the first launch there may be no driver to ask
            return self._first(grid, args, keywords)
        device = driver.active.get_current_device()
        key, values = self._key(device, args, keywords)
        found = self._found.get(key)
        if found is None:
            return self._first(grid, args, keywords)
        made, rest = found
        enter = knobs.runtime.launch_enter_hook
        if enter is not None and getattr(enter, "calls", True):  # a profiler wants to know
            return made[(*grid, 1, 1)](*args, *rest)
        stream = driver.active.get_current_stream(device)
        size = grid if len(grid) == 3 else (*grid, 1, 1)
        made.run(
            size[0], size[1], size[2], stream, made.function, made.packed_metadata, None, None, None, *values, *rest
        )
        return made

    def _key(
        self, device: int, args: tuple[object, ...], keywords: dict[str, object]
    ) -> tuple[tuple[object, ...], list[object]]:
        """Return what Triton would look at, and the arguments with addresses for tensors of a GPU."""
        key, values = [device, *keywords.items()], []
        for arg, kind in zip(args, self._kinds, strict=False):
            if isinstance(arg, torch.Tensor):
                address = arg.data_ptr()
                key.append(_pointers[arg.dtype][address & 15 == 0])
                values.append(address if arg.is_cuda else arg)
            else:
                key.append(kind(arg))
                values.append(arg)
        return tuple(key), values

    def _first(self, grid: tuple[int, ...], args: tuple[object, ...], keywords: dict[str, object]) -> object:
        """Launch as Triton does and keep what it compiled."""
        made = self.run(*args, grid=grid, warmup=False, **keywords)
        rest = self.params[len(args) :]
        # A value that changes from launch to launch must come by position: those by name are kept with the kernel.
        if made is not None and torch.version.hip is None and self._runtime.isdisjoint(p.name for p in rest):
            key, _ = self._key(driver.active.get_current_device(), args, keywords)
            self._found[key] = made, tuple(keywords.get(p.name, p.default) for p in rest)
        return made


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up; Triton's own, made for kernels, takes microseconds on the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is not below n, at least 1."""
    return 1 << max(0, n - 1).bit_length()


def kernel(fn: Callable[..., Any] | None = None, **settings: Any) -> Any:
    """As `triton.jit`, for functions that launchers launch."""
    if fn is None:
        return functools.partial(kernel, **settings)
    return InterpretedFunction(fn, **settings) if knobs.runtime.interpret else Kernel(fn, **settings)
