"""Model directories: how one is made once and whole, what its files hash to, and whether they still do.

A directory holds config.json, tokenizer files, optional safetensors, and `tandem.json` with the SHA-256 of each file.
Knows nothing of what is in the files. Needs no torch.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from core.errors import CheckpointError

MANIFEST = "tandem.json"
_WEIGHTS = (".safetensors",)
_CONFIGS = ("config.json", "generation_config.json", "model.safetensors.index.json")


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What `tandem.json` holds."""

    schema: int = 1
    name: str
    """Name that clients use by default."""
    files: dict[str, str]
    """File name -> SHA-256 in hex."""

    @property
    def revision(self) -> str:
        """Digest of config and weights: what KV pages of this model mean."""
        named = {name: digest for name, digest in self.files.items() if name in _CONFIGS or name.endswith(_WEIGHTS)}
        return _digest_of(named)

    @property
    def tokenizer_digest(self) -> str:
        """SHA-256 of tokenizer.json in hex; empty if there is none."""
        return self.files.get("tokenizer.json", "")


def _digest_of(files: dict[str, str]) -> str:
    return hashlib.sha256("".join(f"{name}\0{files[name]}\n" for name in sorted(files)).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file in hex; raises `CheckpointError` if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"model file {path} cannot be read: {error.strerror}") from error


def describe(directory: Path, name: str) -> Manifest:
    """Hash the files of a directory that has no manifest (or will get one)."""
    names = sorted(p.name for p in directory.iterdir() if p.is_file() and p.name != MANIFEST)
    return Manifest(name=name, files={n: file_digest(directory / n) for n in names if _is_model_file(n)})


def _is_model_file(name: str) -> bool:
    return name.endswith((".json", ".jinja", *_WEIGHTS))


def read_manifest(directory: Path, *, verify: bool = True) -> Manifest:
    """Return the directory's manifest, made on the fly if it has none (then named after the directory).

    With `verify`, every listed file is hashed again; a changed, truncated or missing one raises `CheckpointError`.
    """
    if not directory.is_dir():
        raise CheckpointError(f"model directory {directory} does not exist")
    path = directory / MANIFEST
    if not path.exists():
        return describe(directory, directory.name)
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path} is not a valid model manifest: {error}") from error
    if verify:
        for name, digest in manifest.files.items():
            if file_digest(directory / name) != digest:
                raise CheckpointError(
                    f"model file {directory / name} differs from the checksum in {MANIFEST}; "
                    f"delete {directory} to have it made again"
                )
    return manifest


def write_manifest(directory: Path, name: str) -> None:
    """Hash all files of `directory` into its `tandem.json`."""
    (directory / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(describe(directory, name)), indent=2))


def make_directory(target: Path, name: str, fill: Callable[[Path], None]) -> Path:
    """Return `target`, filled by `fill(temporary directory)` unless it exists; safe against other processes.

    The directory appears by one rename, complete and with its manifest, or not at all.
    """
    if (target / MANIFEST).exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(target.with_name(target.name + ".lock")):
        if (target / MANIFEST).exists():
            return target
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            fill(scratch)
            write_manifest(scratch, name)
            scratch.chmod(0o755)
            if target.exists():
                shutil.rmtree(target)
            scratch.rename(target)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    return target


@contextmanager
def _exclusive(path: Path) -> Generator[None]:
    """Hold an advisory lock on `path`; the empty file stays."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
