"""Who may ask: tenants, their keys (hashed) and their limits, from one TOML file that may change while we run.

A key is 32 random bytes, so one unsalted SHA-256 hides it; the file is no secret. Knows no HTTP and no queue.

::

    admin = ["sha256:<hex>"]         # keys for /debug/*, /status and /metrics
    [[tenants]]
    name = "acme"
    keys = ["sha256:<hex>"]          # `python -m gateway.new_key` prints a key and this line
    weight = 2.0
    requests_per_minute = 600
"""

import asyncio
import hashlib
import hmac
import logging
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from core.errors import ConfigError

logger = logging.getLogger(__name__)

PREFIX = "sha256:"
POLL_S = 0.5
KeyHash = Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}$")]
NotNegative = Annotated[float, Meta(ge=0)]


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tenant. Limits are for the whole deployment; 0 means none."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    keys: tuple[KeyHash, ...] = ()
    weight: Annotated[float, Meta(gt=0)] = 1.0
    """Share of the permits when tenants compete."""
    max_in_flight: Annotated[int, Meta(ge=0)] = 0
    """Samples at once."""
    requests_per_minute: NotNegative = 0.0
    tokens_per_minute: NotNegative = 0.0
    """Prompt and output tokens together."""


class KeyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    admin: tuple[KeyHash, ...] = ()
    tenants: tuple[Tenant, ...] = ()


ANYONE = Tenant(name="anyone")
"""Who asks where no keys are configured."""


def hash_key(key: str) -> str:
    """Return what the file holds of a key."""
    return PREFIX + hashlib.sha256(key.encode()).hexdigest()


def read_keys(path: Path) -> KeyFile:
    """Read and check the file; raises `ConfigError`, which names no key."""
    try:
        found = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), KeyFile)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is no TOML file: {type(error).__name__}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {str(error)[:1].lower()}{str(error)[1:]}") from error
    names = [tenant.name for tenant in found.tenants]
    hashes = [key for tenant in found.tenants for key in tenant.keys] + list(found.admin)
    if len(set(names)) < len(names) or len(set(hashes)) < len(hashes):
        raise ConfigError(f"{path}: a tenant's name or a key stands there twice")
    return found


class Tenants:
    """The tenants as the file has them now. Event loop's thread only."""

    def __init__(self, path: str, on_reload: Callable[[bool], None] = lambda _: None) -> None:
        """`path` empty: everybody may ask. `on_reload` hears of each reload whether it succeeded."""
        self._path = Path(path) if path else None
        self._on_reload = on_reload
        self._stamp = self._now() if self._path is not None else None
        self._file = read_keys(self._path) if self._path is not None else KeyFile()
        self._by_hash = _by_hash(self._file)
        self._by_name = {tenant.name: tenant for tenant in self._file.tenants}

    @property
    def are_open(self) -> bool:
        """True if no keys are asked for."""
        return self._path is None

    def of_key(self, key: str) -> Tenant | None:
        """Return whose key this is. Only hashes are compared, so time says nothing about a key."""
        if self.are_open:
            return ANYONE
        return self._by_hash.get(hash_key(key).encode())

    def is_admin(self, key: str) -> bool:
        """True for an operator's key, and for everybody where no keys are asked for."""
        return self.are_open or _is_one_of(hash_key(key), self._file.admin)

    def named(self, name: str) -> Tenant:
        """Return a tenant's limits; one that has left the file meanwhile has none of its own."""
        return self._by_name.get(name, ANYONE)

    async def follow(self) -> None:
        """Reload the file when it changes; a wrong one is reported and the old one stays. An owned task."""
        if self._path is None:
            return
        while True:
            await asyncio.sleep(POLL_S)
            self.reload_if_changed()

    def reload_if_changed(self) -> None:
        """Look at the file once."""
        assert self._path is not None
        stamp = self._now()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            fresh = read_keys(self._path)
        except ConfigError as error:
            logger.warning("the old keys stay in use: %s", error.message)
            self._on_reload(False)
            return
        for line in _differences(self._file, fresh):
            logger.info("keys reloaded: %s", line)
        self._file, self._by_hash = fresh, _by_hash(fresh)
        self._by_name = {tenant.name: tenant for tenant in fresh.tenants}
        self._on_reload(True)

    def _now(self) -> tuple[int, int, int] | None:
        assert self._path is not None
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


def _by_hash(file: KeyFile) -> dict[bytes, Tenant]:
    return {key.encode(): tenant for tenant in file.tenants for key in tenant.keys}


def _is_one_of(found: str, hashes: Iterable[str]) -> bool:
    matches = [hmac.compare_digest(found, each) for each in hashes]
    return any(matches)


def _differences(old: KeyFile, new: KeyFile) -> list[str]:
    """Say in plain lines what changed, without keys."""
    before, after = ({tenant.name: tenant for tenant in file.tenants} for file in (old, new))
    lines = [f"tenant {name} removed" for name in sorted(before.keys() - after.keys())]
    lines += [f"tenant {name} added" for name in sorted(after.keys() - before.keys())]
    for name in sorted(before.keys() & after.keys()):
        changed = [
            field for field in Tenant.__struct_fields__ if getattr(before[name], field) != getattr(after[name], field)
        ]
        shown = (
            "keys" if field == "keys" else f"{field} {getattr(before[name], field)} -> {getattr(after[name], field)}"
            for field in changed
        )
        if changed:
            lines.append(f"tenant {name}: {', '.join(shown)}")
    if old.admin != new.admin:
        lines.append("admin keys")
    return lines
