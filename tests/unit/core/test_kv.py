"""Layouts as numbers: canonical bytes, semantic digest, and foreign versions refused."""

import msgspec
import pytest

from core.errors import NamespaceMismatch
from core.kv import LAYOUT_VERSION, Component, ComponentKind, KVLayout, decode_layout


def component(name="full", kind=ComponentKind.PAGED, **changes):
    values = {"record_bytes": 512, "num_records": 8, "stride_bytes": 512, "layers": ("a", "b"), "elem": "f32"}
    return Component(name=name, kind=kind, **{**values, **changes})


def layout(*components, **changes):
    return KVLayout(page_tokens=16, components=components or (component(),), **changes)


def test_a_layout_survives_its_bytes():
    ours = layout(component(), component("ring", ComponentKind.RING, capacity_tokens=24))
    assert decode_layout(ours.encode()) == ours
    assert ours.encode() == decode_layout(ours.encode()).encode()


def test_components_are_found_by_name_and_row_state_is_seen():
    ours = layout(component(), component("ring", ComponentKind.RING))
    assert ours.component("ring").kind is ComponentKind.RING
    assert ours.has_row_state
    assert not layout().has_row_state
    with pytest.raises(KeyError):
        ours.component("none")


@pytest.mark.parametrize("where", [{"num_records": 99}, {"stride_bytes": 1024}, {"offset": 64}, {"region": 3}])
def test_pool_sizes_and_addresses_do_not_change_the_meaning(where):
    assert layout(component(**where)).digest() == layout().digest()


@pytest.mark.parametrize("what", [{"record_bytes": 256}, {"layers": ("a",)}, {"elem": "bf16"}, {"heads": 2}])
def test_what_a_record_holds_does(what):
    assert layout(component(**what)).digest() != layout().digest()


def test_the_order_of_components_does_not_change_the_meaning():
    a, b = component("a"), component("b")
    assert layout(a, b).digest() == layout(b, a).digest()


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"\x80", msgspec.msgpack.encode({"page_tokens": "many", "components": []})],
)
def test_bytes_that_are_no_layout_are_refused(data):
    with pytest.raises(NamespaceMismatch, match="cannot be read"):
        decode_layout(data)


def test_another_version_is_refused_with_both_numbers():
    foreign = layout(version=LAYOUT_VERSION + 1)
    with pytest.raises(NamespaceMismatch, match=f"version {LAYOUT_VERSION + 1}, ours is {LAYOUT_VERSION}"):
        decode_layout(foreign.encode())


def test_a_later_version_is_named_although_it_cannot_be_read():
    later = msgspec.msgpack.encode({"version": LAYOUT_VERSION + 1, "components": "of a kind we do not know"})
    with pytest.raises(NamespaceMismatch, match=f"has version {LAYOUT_VERSION + 1}, ours is {LAYOUT_VERSION}"):
        decode_layout(later)
