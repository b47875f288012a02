"""Makes Triton's interpreter round as hardware does: its own casts truncate bfloat16 and miss ties of e4m3, and its
products of bfloat16 multiply bit patterns. Conversions go through torch; nothing else of the interpreter is touched.
"""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TYPES = {
    "fp32": (torch.float32, np.uint32),
    "fp16": (torch.float16, np.uint16),
    "bf16": (torch.bfloat16, np.uint16),
    "fp8e4nv": (torch.float8_e4m3fn, np.uint8),
    "fp8e5": (torch.float8_e5m2, np.uint8),
}


def _convert(values: np.ndarray, source: tl.dtype, target: tl.dtype, _rounding: object) -> np.ndarray:
    wide, narrow = _TYPES[source.name], _TYPES[target.name]
    raw = torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(wide[1]).copy())
    return raw.view(wide[0]).to(narrow[0]).view(_integer(narrow[1])).numpy().view(narrow[1]).reshape(values.shape)


def _integer(kind: type) -> torch.dtype:
    return {np.uint32: torch.int32, np.uint16: torch.int16, np.uint8: torch.uint8}[kind]


def _dot(_builder: object, a: object, b: object, d: object, _precision: object, _imprecise: object) -> object:
    left, right = (
        x.data if x.dtype.name == "fp32" else _convert(x.data, x.dtype, tl.float32, None).view(np.float32)
        for x in (a, b)
    )
    return interpreter.TensorHandle(np.matmul(left, right, dtype=d.data.dtype) + d.data, d.dtype.scalar)


def install() -> None:
    """Replace the interpreter's casts and products in this process."""
    interpreter._convert_float = _convert  # noqa: SLF001 - there is no public hook
    interpreter.InterpreterBuilder.create_dot = _dot
