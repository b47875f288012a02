"""Proof of the cluster secret in metadata."""

import pytest

from core.errors import ConfigError
from core.hashing import check_value
from core.ids import Incarnation
from core.rpc.proof import CHECK_KEY, INCARNATION_KEY, Proof

SECRET = b"0123456789abcdef"
ONE = Proof(SECRET, Incarnation("1" * 32))
TWO = Proof(SECRET, Incarnation("2" * 32))


def test_processes_of_one_secret_know_each_other_by_incarnation():
    assert ONE.verify(TWO.metadata) == "2" * 32


def test_another_secret_is_refused():
    with pytest.raises(ConfigError, match="same secret file"):
        ONE.verify(Proof(b"another secret!!", Incarnation("2" * 32)).metadata)


def test_a_proof_is_bound_to_its_incarnation():
    stolen = dict(TWO.metadata)[CHECK_KEY]
    with pytest.raises(ConfigError):
        ONE.verify(((INCARNATION_KEY, "3" * 32), (CHECK_KEY, stolen)))


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        ((INCARNATION_KEY, "2" * 32),),
        ((CHECK_KEY, check_value(SECRET, "")),),
        ((INCARNATION_KEY, ""), (CHECK_KEY, check_value(SECRET, ""))),
        ((INCARNATION_KEY, "2" * 32), (CHECK_KEY, "text")),
        ((INCARNATION_KEY, b"2" * 32), (CHECK_KEY, check_value(SECRET, "2" * 32))),
    ],
    ids=["nothing", "no check", "no incarnation", "empty incarnation", "text check", "bytes incarnation"],
)
def test_missing_or_malformed_proof_is_refused(metadata):
    with pytest.raises(ConfigError, match="secret"):
        ONE.verify(metadata)


def test_the_secret_itself_never_travels():
    assert all(SECRET not in (value if isinstance(value, bytes) else value.encode()) for _, value in ONE.metadata)


def test_the_check_value_is_what_a_registration_carries():
    assert TWO.accepts("1" * 32, ONE.check_value())
    assert not TWO.accepts("2" * 32, ONE.check_value())
