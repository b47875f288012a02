"""Configuration: TOML and ``--set a.b=c`` become a frozen struct; errors are one plain sentence.

The only reader of the environment (`native_environment`). Secrets are files named by the configuration, never
variables or values. Knows no service's settings: structs are declared beside their owners.
"""

import argparse
import json
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, TypeVar, Union, cast, get_args, get_origin

import msgspec

from core.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)

MIN_SECRET_BYTES = 16
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SECRET_KEY = re.compile(r"(^|_)(secret|password|token|api_key)$")
_MASK = "***"


@dataclass(frozen=True, slots=True)
class Arguments:
    """The command line of every service: nothing but a file and single settings."""

    config: Path | None
    overrides: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}")


def parse_args(argv: Sequence[str], prog: str = "tandem") -> Arguments:
    """Parse ``--config FILE`` and repeated ``--set a.b=c``; raises `ConfigError`, and SystemExit for ``--help``."""
    parser = _Parser(prog=prog, allow_abbrev=False)
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings in TOML")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=C",
        dest="overrides",
        help="one setting over the file's; the value is TOML, or a bare string; may be repeated",
    )
    found = parser.parse_args(list(argv))
    return Arguments(found.config, tuple(found.overrides))


def load(kind: type[T], path: Path | None, overrides: Sequence[str] = ()) -> T:
    """Read `kind` from a TOML file (None: defaults only), then apply overrides in order.

    Unknown keys and wrong types raise `ConfigError` that names the source, the key and what is expected.
    Relative paths in values stay relative to the working directory.
    """
    source = str(path) if path is not None else "the configuration"
    tree = _read(path) if path is not None else {}
    _refuse_unknown(kind, tree, "", source)
    for override in overrides:
        _apply(kind, tree, override)
    try:
        return msgspec.convert(tree, kind, dec_hook=_decode_path)
    except msgspec.ValidationError as error:
        raise _plain(error, source, overrides) from error


def _plain(error: msgspec.ValidationError, source: str, overrides: Sequence[str]) -> ConfigError:
    text, _, where = str(error).partition(" - at `$")
    text = text.replace("`object`", "a section")
    key = where.rstrip("`").lstrip(".")
    missing = re.fullmatch(r"Object missing required field `(\w+)`", text)
    if missing is not None:
        key = f"{key}.{missing[1]}" if key else missing[1]
        return ConfigError(
            f"{source}: {key} is required and not set; write it there or pass --set {key}=...", param=key
        )
    for override in overrides:
        if override.partition("=")[0].strip() == key.partition("[")[0]:
            source = f"--set {override}"
    return ConfigError(f"{source}: {key or 'the top level'}: {text[:1].lower()}{text[1:]}", param=key)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _refuse_unknown(kind: Any, tree: Mapping[str, Any], prefix: str, source: str) -> None:
    fields = _fields(kind)
    for key, value in tree.items():
        if key not in fields:
            near = get_close_matches(key, fields, 1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known keys here: {', '.join(sorted(fields))}"
            raise ConfigError(f"{source}: unknown key {prefix}{key}; {hint}", param=f"{prefix}{key}")
        inner = _struct_of(fields[key])
        if inner is not None and isinstance(value, dict):
            _refuse_unknown(inner, cast("dict[str, Any]", value), f"{prefix}{key}.", source)


def _fields(kind: Any) -> dict[str, Any]:
    return {field.encode_name: field.type for field in msgspec.structs.fields(kind)}


def _bare(kind: Any) -> Any:
    """Strip Annotated and NewType."""
    while True:
        if hasattr(kind, "__supertype__"):
            kind = kind.__supertype__
        elif hasattr(kind, "__metadata__"):
            kind = kind.__origin__
        else:
            return kind


def _struct_of(kind: Any) -> Any:
    """Return the struct type that a field holds (also if optional), else None."""
    kind = _bare(kind)
    if get_origin(kind) in (Union, UnionType):
        found = [inner for inner in map(_struct_of, get_args(kind)) if inner is not None]
        return found[0] if len(found) == 1 else None
    return kind if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else None


def _takes_text(kind: Any) -> bool:
    kind = _bare(kind)
    if get_origin(kind) in (Union, UnionType):
        return any(map(_takes_text, get_args(kind)))
    return isinstance(kind, type) and issubclass(kind, (str, Path))


def _apply(kind: type[msgspec.Struct], tree: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(_BARE_KEY.fullmatch(key) for key in keys):
        raise ConfigError(f"--set {override!r} is not of the form a.b=c")
    _refuse_unknown(kind, _nested(keys, 0), "", f"--set {override}")
    fields: Any = kind
    node = tree
    for depth, key in enumerate(keys[:-1]):
        fields = _struct_of(_fields(fields).get(key)) if fields is not None else None
        inner = node.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {override!r}: {'.'.join(keys[: depth + 1])} is a value, not a section")
        node = cast("dict[str, Any]", inner)
    field = _fields(fields).get(keys[-1]) if fields is not None else None
    node[keys[-1]] = _parse_value(text.strip(), is_text=field is not None and _takes_text(field))


def _nested(keys: Sequence[str], value: Any) -> dict[str, Any]:
    for key in reversed(keys):
        value = {key: value}
    return cast("dict[str, Any]", value)


def _parse_value(text: str, *, is_text: bool) -> Any:
    """Parse as TOML; what is no TOML value is a bare string. A text field keeps numbers and dates as they are typed."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    if set(parsed) != {"value"}:
        return text
    value = parsed["value"]
    return text if is_text and not isinstance(value, str) else value


def _decode_path(kind: type, value: Any) -> Any:
    if issubclass(kind, Path) and isinstance(value, str):
        return Path(value)
    # msgspec adds the key's path to a TypeError of a hook, and to no other error.
    raise TypeError(f"Expected `{kind.__name__}`, got `{type(value).__name__}`")


def dump(config: msgspec.Struct) -> str:
    """Return the resolved configuration as TOML that `load` reads back; secrets are masked, None is left out."""
    return to_toml(msgspec.to_builtins(config, enc_hook=_encode_path, str_keys=True))


def to_toml(tree: Mapping[str, Any]) -> str:
    """Return nested plain data as TOML; values of secret keys are masked, None is left out."""
    lines: list[str] = []
    _dump_table(tree, (), lines)
    return "\n".join(lines).strip("\n") + "\n"


def _encode_path(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"a configuration cannot hold {type(value).__name__}")


def _dump_table(table: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    values = {key: value for key, value in table.items() if not isinstance(value, dict) and value is not None}
    if path and (values or not table):
        lines += ["", f"[{'.'.join(map(_dump_key, path))}]"]
    for key, value in values.items():
        shown = _MASK if _SECRET_KEY.search(key) and value else value
        lines.append(f"{_dump_key(key)} = {_dump_value(shown)}")
    for key, value in table.items():
        if isinstance(value, dict):
            _dump_table(cast("dict[str, Any]", value), (*path, key), lines)


def _dump_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _dump_value(key)


def _dump_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_dump_value(item) for item in cast("list[Any]", value) if item is not None) + "]"
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value).items()
        return "{" + ", ".join(f"{_dump_key(key)} = {_dump_value(item)}" for key, item in pairs) + "}"
    # JSON's escapes are TOML's; only DEL must be escaped here and not there.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def read_secret(path: Path | str) -> bytes:
    """Read the cluster secret: the file's bytes without surrounding white space, at least 16; raises `ConfigError`."""
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the cluster secret {path}: {(error.strerror or str(error)).lower()}") from error
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(f"the cluster secret {path} has {len(secret)} bytes; write at least {MIN_SECRET_BYTES}")
    return secret


def prepare_native_libraries() -> None:
    """Set what native libraries of this very process read only from the environment; before their first use."""
    # MKL splits a long sum over its threads, so a row's bits would change with the thread count; strict mode forbids
    # it, at no cost seen on AVX-512. Prefill and decode workers may have different counts and must agree (A14).
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def native_environment(*, threads: int = 0) -> dict[str, str]:
    """Return the environment for a child process: ours, plus what native libraries read only there.

    `threads` > 0 bounds the pools of OpenMP and BLAS, which are sized when a library is loaded.
    """
    environment = dict(os.environ)
    environment["PYTHONUNBUFFERED"] = "1"
    environment["TOKENIZERS_PARALLELISM"] = "false"
    environment.setdefault("GRPC_VERBOSITY", "ERROR")
    # NIXL and UCX: failures only; both print every connection otherwise. What steers them goes with each engine's options.
    environment.setdefault("NIXL_LOG_LEVEL", "ERROR")
    environment.setdefault("UCX_LOG_LEVEL", "error")
    # Mooncake: how long a batch may hang (seconds; it takes 5 at least), and one line per failure only.
    environment.setdefault("MC_TRANSFER_TIMEOUT", "10")
    environment.setdefault("MC_LOG_LEVEL", "ERROR")
    if threads > 0:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            environment[name] = str(threads)
    return environment
