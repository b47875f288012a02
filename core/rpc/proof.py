"""Proof of the cluster secret in call metadata: made by clients, checked by every server before a byte is read.

The secret itself never travels; the check value is bound to the caller's incarnation. Encryption is `tls`'s business.
"""

import hmac
from collections.abc import Iterable

from core.errors import ConfigError
from core.hashing import check_value
from core.ids import Incarnation
from core.tls import TlsSection

INCARNATION_KEY = "tandem-incarnation"
CHECK_KEY = "tandem-check-bin"

Metadata = tuple[tuple[str, str | bytes], ...]


class Proof:
    """How one process proves that it belongs here: the secret, and certificates if TLS is on. Immutable; any thread."""

    def __init__(self, secret: bytes, incarnation: Incarnation, tls: TlsSection | None = None) -> None:
        """`tls` as `core.tls.check_tls` returns it."""
        self._secret = secret
        self.incarnation = incarnation
        self.tls = tls
        self.metadata: Metadata = (
            (INCARNATION_KEY, incarnation),
            (CHECK_KEY, check_value(secret, incarnation)),
        )

    def verify(self, metadata: Iterable[tuple[str, str | bytes]]) -> Incarnation:
        """Return the caller's incarnation; raises `ConfigError` if it does not know our secret."""
        found = dict(metadata)
        incarnation, check = found.get(INCARNATION_KEY, ""), found.get(CHECK_KEY, b"")
        if not isinstance(incarnation, str) or not isinstance(check, bytes) or not incarnation:
            raise ConfigError("the caller sent no proof of the cluster secret")
        if not self.accepts(incarnation, check):
            raise ConfigError("the caller does not know the cluster secret; give every process the same secret file")
        return Incarnation(incarnation)

    def accepts(self, incarnation: str, check: bytes) -> bool:
        """True if `check` proves our secret for that incarnation (also used for `Registration.secret_check`)."""
        return hmac.compare_digest(check, check_value(self._secret, incarnation))

    def check_value(self) -> bytes:
        """Our own check value, for `Registration.secret_check`."""
        return check_value(self._secret, self.incarnation)
