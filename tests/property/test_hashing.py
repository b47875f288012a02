"""Page identity: the chain is a function of everything before it, and of whose pages they are (decision A4)."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.hashing import Namespace, PageHasher, check_value, event_hash, fingerprint, namespace_field

NAMESPACE = Namespace(model="m", revision="r", tokenizer="t", kv_dtype="f32", page_tokens=4)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def hasher(namespace=NAMESPACE, secret=b"secret"):
    return PageHasher(secret, namespace.encode(), namespace.page_tokens)


@given(TOKENS, st.integers(0, 10))
def test_a_chain_made_in_two_parts_equals_the_chain_made_at_once(tokens, pages):
    h = hasher()
    cut = min(pages, len(tokens) // 4) * 4
    head = h.extend(h.root(), tokens[:cut])
    tail = h.extend(head[-1] if head else h.root(), tokens[cut:])
    assert head + tail == h.extend(h.root(), tokens)


@given(TOKENS)
def test_only_full_pages_are_hashed_and_all_hashes_differ(tokens):
    h = hasher()
    chain = h.extend(h.root(), tokens)
    assert len(chain) == len(tokens) // 4
    assert len({h.root(), *chain}) == len(chain) + 1


@given(st.lists(st.integers(0, 1000), min_size=8, max_size=40), st.data())
def test_a_changed_token_changes_its_page_and_all_later_ones_and_no_earlier_one(tokens, data):
    h = hasher()
    at = data.draw(st.integers(0, len(tokens) // 4 * 4 - 1))
    changed = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    ours, theirs = h.extend(h.root(), tokens), h.extend(h.root(), changed)
    assert [a == b for a, b in zip(ours, theirs, strict=True)] == [i < at // 4 for i in range(len(ours))]


@given(st.tuples(*[st.text(max_size=6)] * 3), st.tuples(*[st.text(max_size=6)] * 3))
def test_tenants_salts_and_adapters_never_share_a_root(ours, theirs):
    h = hasher()
    assert (h.root(*ours) == h.root(*theirs)) == (ours == theirs)


@pytest.mark.parametrize("field", [f for f in NAMESPACE.__struct_fields__ if f != "page_tokens"])
def test_each_field_of_the_namespace_separates_pages(field):
    value = getattr(NAMESPACE, field)
    other = msgspec.structs.replace(NAMESPACE, **{field: value + 1 if isinstance(value, int) else value + "x"})
    assert other.encode() != NAMESPACE.encode()
    assert hasher(other).root() != hasher().root()
    assert fingerprint(other.encode()) != fingerprint(NAMESPACE.encode())


def test_fields_cannot_run_into_one_another():
    a = msgspec.structs.replace(NAMESPACE, model="ab", revision="c")
    b = msgspec.structs.replace(NAMESPACE, model="a", revision="bc")
    assert a.encode() != b.encode()


def test_another_secret_gives_other_roots_and_check_values():
    assert hasher(secret=b"other").root() != hasher().root()
    assert check_value(b"a", "i") != check_value(b"b", "i")
    assert check_value(b"a", "i") != check_value(b"a", "j")


@given(st.lists(st.binary(min_size=1, max_size=4), min_size=1, max_size=3))
def test_images_in_a_page_are_part_of_its_identity(digests):
    h = hasher()
    plain = h.extend(h.root(), [1, 2, 3, 4])
    assert h.extend(h.root(), [1, 2, 3, 4], [digests]) != plain
    assert h.extend(h.root(), [1, 2, 3, 4], [[]]) == plain


def test_event_hashes_are_signed_64_bit_and_reveal_no_chain():
    h = hasher()
    (page,) = h.extend(h.root(), [1, 2, 3, 4])
    assert -(2**63) <= event_hash(page) < 2**63
    assert event_hash(page).to_bytes(8, "little", signed=True) not in page


def test_the_draft_model_and_the_protocol_are_part_of_the_fingerprint():
    space = NAMESPACE.encode()
    assert len({fingerprint(space), fingerprint(space, "draft"), fingerprint(space, "", 2)}) == 3


@given(st.text(max_size=8), st.text(max_size=8), st.integers(0, 200))
def test_fields_of_a_namespace_are_read_back_whole_or_not_at_all(model, tokenizer, cut):
    named = msgspec.structs.replace(NAMESPACE, model=model, tokenizer=tokenizer)
    encoded = named.encode()
    for field in Namespace.__struct_fields__:
        assert namespace_field(encoded, field) == str(getattr(named, field))
    assert namespace_field(encoded[:cut], "tokenizer") in ("", tokenizer)
    assert namespace_field(b"something else", "tokenizer") == ""
