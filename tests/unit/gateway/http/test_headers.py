import pytest

from core.errors import BadRequest
from gateway.http.headers import ignored_fields, read_hints


def test_ids_and_sessions_are_taken_when_well_formed():
    hints = read_hints([(b"x-request-id", b"abc-1"), (b"x-correlation-id", b"c"), (b"x-session-affinity", b"s")], 60)
    assert (hints.request_id, hints.session, hints.timeout_s) == ("abc-1", "s", 60)
    assert read_hints([(b"x-correlation-id", b"c")], 60).session == "c"


@pytest.mark.parametrize("value", [b"", b"a b", b"a\tb", b"\xff", b"x" * 129, b'a"b'])
def test_an_ill_formed_request_id_is_ignored(value: bytes):
    assert read_hints([(b"x-request-id", value)], 60).request_id is None


def test_a_deadline_shortens_but_never_lengthens():
    assert read_hints([(b"x-deadline-ms", b"1500")], 60).timeout_s == 1.5
    assert read_hints([(b"x-deadline-ms", b"999999")], 60).timeout_s == 60


@pytest.mark.parametrize("value", [b"", b"0", b"-1", b"soon", b"1.5", "²".encode("latin-1")])
def test_an_ill_formed_deadline_is_refused(value: bytes):
    with pytest.raises(BadRequest):
        read_hints([(b"x-deadline-ms", value)], 60)


def test_names_of_ignored_fields_cannot_break_a_header():
    assert ignored_fields(["good_one", "bad\r\nx: y", "ünicode", "x" * 65]) == b"good_one, ?, ?, ?"
    assert ignored_fields([f"f{i}" for i in range(20)]).endswith(b"f15, ...")
