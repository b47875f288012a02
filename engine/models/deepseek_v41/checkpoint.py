"""A published checkpoint directory against its inventory: every tensor is there with its type and shape, or is named.

Files are memory-mapped and a tensor is a view of its file until somebody converts it, so the n-gram tables are never
copied. Knows names, types and bytes of tensors, not what they mean.
"""

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from core.errors import CheckpointError
from engine.models.deepseek_v41.inventory import TensorSpec
from engine.models.deepseek_v41.sharding import Slice

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class IndexMetadata(msgspec.Struct, kw_only=True):
    """`metadata` of an index; others' keys are ignored."""

    total_size: int = 0
    crc32: dict[str, int] = {}
    """Checksum per tensor; our exporter writes it, others do not."""


class Index(msgspec.Struct, kw_only=True):
    """An index of shards."""

    metadata: IndexMetadata = msgspec.field(default_factory=IndexMetadata)
    weight_map: dict[str, str]


class _Entry(msgspec.Struct):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class PublishedCheckpoint:
    """Open files of one checkpoint. Tensors stay valid as long as anybody holds them."""

    def __init__(self, directory: Path, *, verify: bool = True) -> None:
        """Open all shards; with `verify`, tensors are compared with the checksums of the index when they are read.

        Raises `CheckpointError` for a missing, truncated or corrupted file, naming a tensor that it should hold.
        """
        self._directory = directory
        self._files: dict[str, Any] = {}
        self._index = self._read_index()
        self._where: dict[str, tuple[str, _Entry]] = {}
        self._crc32: Mapping[str, int] = {}
        if self._index is None:
            self._open(SINGLE, ())
        else:
            self._open_shards(self._index)
            self._crc32 = self._index.metadata.crc32 if verify else {}

    def dtype_of(self, name: str) -> str | None:
        """Return a tensor's type in safetensors' spelling, None if there is no such tensor."""
        found = self._where.get(name)
        return None if found is None else found[1].dtype

    def check(self, specs: Iterable[TensorSpec], *, optional: Sequence[str] = ()) -> None:
        """Compare with an inventory; raises `CheckpointError` naming the first tensor that is missing, extra or wrong.

        Tensors whose names begin with one of `optional` may be missing or extra.
        """
        optional_names = tuple(optional)
        wanted: set[str] = set()
        missing: list[str] = []
        for spec in specs:
            wanted.add(spec.name)
            found = self._where.get(spec.name)
            if found is not None:
                self._check_entry(spec, *found)
            elif not spec.name.startswith(optional_names):
                missing.append(spec.name)
        if missing:
            raise CheckpointError(f"tensor {missing[0]}{_more(missing)} is missing from {self._directory}")
        extra = sorted(name for name in self._where.keys() - wanted if not name.startswith(optional_names))
        if extra:
            raise CheckpointError(
                f"{self._directory} has tensor {extra[0]}{_more(extra)}, which this configuration does not use"
            )

    def get(self, name: str) -> torch.Tensor:
        """Return a tensor as it is stored: a view of the mapped file. Raises `CheckpointError` naming it."""
        file = self._file_of(name)
        try:
            tensor: torch.Tensor = self._files[file].get_tensor(name)
        except (SafetensorError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"tensor {name} in {self._directory / file} cannot be read: {error}") from error
        expected = self._crc32.get(name)
        if expected is not None and crc32_of(tensor) != expected:
            raise CheckpointError(f"tensor {name} in {self._directory / file} is corrupted: its checksum differs")
        return tensor

    def get_slice(self, name: str, part: Slice | None) -> torch.Tensor:
        """Return one rank's part of a tensor, reading no more than that; None stands for the whole."""
        if part is None:
            return self.get(name)
        file = self._file_of(name)
        try:
            handle = self._files[file].get_slice(name)
            return handle[(slice(None),) * part.dim + (slice(part.start, part.stop),)]
        except (SafetensorError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"tensor {name} in {self._directory / file} cannot be read: {error}") from error

    def _file_of(self, name: str) -> str:
        found = self._where.get(name)
        if found is None:
            raise CheckpointError(f"tensor {name} is missing from {self._directory}")
        return found[0]

    def _check_entry(self, spec: TensorSpec, file: str, entry: _Entry) -> None:
        if entry.dtype not in (spec.dtype, *spec.accepted):
            raise CheckpointError(
                f"tensor {spec.name} in {self._directory / file} has type {entry.dtype}, expected {spec.dtype}"
            )
        if entry.shape != spec.shape:
            raise CheckpointError(
                f"tensor {spec.name} in {self._directory / file} has shape {list(entry.shape)}, "
                f"the configuration asks for {list(spec.shape)}"
            )

    def _read_index(self) -> Index | None:
        path = self._directory / INDEX
        if not path.exists():
            return None
        try:
            return msgspec.json.decode(path.read_bytes(), type=Index)
        except (OSError, msgspec.DecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def _open_shards(self, index: Index) -> None:
        listed: dict[str, list[str]] = {}
        for name, file in index.weight_map.items():
            listed.setdefault(file, []).append(name)
        for file, names in sorted(listed.items()):
            if Path(file).name != file:
                raise CheckpointError(f"{self._directory / INDEX} names a shard outside the directory: {file!r}")
            self._open(file, names)
            absent = [name for name in names if name not in self._where or self._where[name][0] != file]
            if absent:
                raise CheckpointError(
                    f"tensor {absent[0]}{_more(absent)} is missing from {self._directory / file}, "
                    f"where the index has it"
                )

    def _open(self, file: str, names: Sequence[str]) -> None:
        path = self._directory / file
        held = f", which holds tensor {names[0]}{_more(names)}," if names else ""
        try:
            entries, begin = _read_header(path)
            _check_extent(path, entries, begin)
            self._files[file] = safe_open(str(path), framework="pt")
        except FileNotFoundError as error:
            raise CheckpointError(f"model file {path}{held} does not exist") from error
        except (SafetensorError, OSError, ValueError, msgspec.DecodeError) as error:
            raise CheckpointError(f"model file {path}{held} is truncated or corrupted: {error}") from error
        for name, entry in entries.items():
            if name in self._where:
                raise CheckpointError(f"tensor {name} is in {self._where[name][0]} and again in {file}")
            self._where[name] = (file, entry)


def crc32_of(tensor: torch.Tensor) -> int:
    """Return the checksum of a contiguous CPU tensor's bytes."""
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


_LENGTH_BYTES = 8
_MOST_HEADER = 100 << 20


def _read_header(path: Path) -> tuple[dict[str, _Entry], int]:
    """Return the tensors of a file and where its data begins; raises `ValueError` if it has no header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if not 2 <= length <= _MOST_HEADER:
            raise ValueError(f"its header claims {length} bytes")
        encoded = file.read(length)
    if len(encoded) < length:
        raise ValueError(f"it ends within its header of {length} bytes")
    try:
        header: dict[str, Any] = json.loads(encoded)
    except UnicodeDecodeError as error:
        raise ValueError("its header is not text") from error
    header.pop("__metadata__", None)
    return msgspec.convert(header, dict[str, _Entry]), _LENGTH_BYTES + length


def _check_extent(path: Path, entries: Mapping[str, _Entry], begin: int) -> None:
    """Raise `CheckpointError` naming the first tensor whose bytes the file does not have."""
    size = path.stat().st_size
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        end = begin + entry.data_offsets[1]
        if end > size:
            raise CheckpointError(f"model file {path} is truncated: tensor {name} ends at byte {end} of {size}")
