"""Writes a safetensors file tensor by tensor, so that a conversion never holds the whole model in memory.

Data starts on a 64-byte border of the file (readers map it, and matrix kernels like aligned weights). Needs no torch.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from core.errors import InvariantError

_ALIGN = 64
_NAMES = {"float32": "F32", "float64": "F64"}


def write_safetensors(
    path: Path, shapes: Mapping[str, Sequence[int]], dtype: type[np.floating], tensors: Iterable[npt.NDArray[Any]]
) -> None:
    """Write `tensors`, which come in the order of `shapes`, as `dtype`."""
    itemsize = np.dtype(dtype).itemsize
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + int(np.prod(shape)) * itemsize
        header[name] = {"dtype": _NAMES[np.dtype(dtype).name], "shape": list(shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-(8 + len(encoded)) % _ALIGN)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for (name, shape), tensor in zip(shapes.items(), tensors, strict=True):
            if tensor.shape != tuple(shape):
                raise InvariantError(f"tensor {name} was announced as {list(shape)} and is {list(tensor.shape)}")
            file.write(np.ascontiguousarray(tensor, dtype).data)
