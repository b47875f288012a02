"""Certificates of this process, as files: read anew for every use, so that a renewed one needs no restart.

Settings and bytes only; `core.rpc.credentials` makes gRPC's credentials of them, `gateway.http.server` an SSL context.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from core.errors import ConfigError


class TlsSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[tls]`: mutual TLS between the processes of a cluster. All empty: plain connections."""

    certificate: str = ""
    """PEM file: this process's certificate and its chain."""
    key: str = ""
    """PEM file: its private key."""
    authority: str = ""
    """PEM file: the authority that signs every process of the cluster; nobody else is talked to."""
    peer_name: str = "tandem"
    """The name that the certificates of all processes carry: addresses change with every start, this does not."""


@dataclass(frozen=True, slots=True)
class Pem:
    """What the three files hold."""

    certificate: bytes
    key: bytes
    authority: bytes


def check_tls(section: TlsSection) -> TlsSection | None:
    """Return the section if TLS is on, None if it is off; raises `ConfigError` for half a set or unreadable files."""
    files = (section.certificate, section.key, section.authority)
    if not any(files):
        return None
    if not all(files):
        raise ConfigError("tls needs certificate, key and authority, all three or none", param="tls")
    read_pem(section)
    return section


def read_pem(section: TlsSection) -> Pem:
    """Read the files as they are now; raises `ConfigError` that names the one which is missing or no PEM."""
    return Pem(*(_read(path) for path in (section.certificate, section.key, section.authority)))


def _read(path: str) -> bytes:
    try:
        found = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {(error.strerror or str(error)).lower()}", param="tls") from error
    if b"-----BEGIN " not in found:
        raise ConfigError(f"{path} is not a PEM file", param="tls")
    return found
