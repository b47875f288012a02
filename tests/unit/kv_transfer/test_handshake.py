"""What two processes must agree on, and which transport they take."""

import msgspec
import pytest

from core.errors import LayoutMismatch, NamespaceMismatch, TransferFailed
from kv_transfer.handshake import check_fingerprint, check_layouts, expand, transport_order
from tests.fakes.kv_pools import make_layout

LAYOUT = make_layout(num_pages=8)


def changed(name: str, **fields):
    parts = tuple(msgspec.structs.replace(c, **fields) if c.name == name else c for c in LAYOUT.components)
    return msgspec.structs.replace(LAYOUT, components=parts)


def test_equal_fingerprints_pass_and_others_are_refused():
    check_fingerprint(b"a", b"a")
    with pytest.raises(NamespaceMismatch, match="fingerprint"):
        check_fingerprint(b"a", b"b")


def test_pool_sizes_strides_offsets_and_regions_may_differ():
    other = changed("kv", num_records=999, stride_bytes=4096, offset=64, region=9)
    assert check_layouts(LAYOUT, other) == ()
    assert check_layouts(other, LAYOUT) == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("record_bytes", 1),
        ("layers", ("x",)),
        ("total_heads", 1),
        ("head_dim", 4),
        ("elem", "bf16"),
        ("capacity_tokens", 8),
    ],
)
def test_a_difference_of_meaning_names_its_path(field, value):
    with pytest.raises(LayoutMismatch, match=rf"components\[kv\].{field}: the source has"):
        check_layouts(LAYOUT, changed("kv", **{field: value}))


def test_page_sizes_must_be_equal():
    with pytest.raises(LayoutMismatch, match="page_tokens: the source has 16, the destination 32"):
        check_layouts(LAYOUT, msgspec.structs.replace(LAYOUT, page_tokens=32))


def test_a_component_that_only_the_destination_has_is_refused():
    less = msgspec.structs.replace(LAYOUT, components=LAYOUT.components[:2])
    with pytest.raises(LayoutMismatch, match=r"components\[ring\]"):
        check_layouts(less, LAYOUT)


def test_a_component_that_only_the_source_has_is_named_and_skipped():
    less = msgspec.structs.replace(LAYOUT, components=LAYOUT.components[:2])
    assert check_layouts(LAYOUT, less) == ("ring", "state")


def test_auto_prefers_shared_memory_and_keeps_the_configured_order():
    assert expand(["auto"]) == ("shm", "tcp")
    assert expand(["loopback", "auto", "tcp"]) == ("loopback", "shm", "tcp")
    assert expand(["auto"], on_device=True) == ("cuda-ipc", "shm", "tcp")
    assert expand(["tcp"], on_device=True) == ("tcp",)
    assert transport_order(["auto"], ["tcp", "shm"]) == ("shm", "tcp")
    assert transport_order(["tcp", "shm"], ["shm", "tcp"]) == ("tcp", "shm")
    assert transport_order(["auto"], ["tcp"]) == ("tcp",)
    assert transport_order(["auto"], ["tcp", "cuda-ipc"], on_device=True) == ("cuda-ipc", "tcp")
    assert transport_order(["auto"], ["tcp", "cuda-ipc"]) == ("tcp",)


def test_nothing_in_common_says_what_both_sides_have():
    with pytest.raises(TransferFailed, match="wants tcp, the source exports shm"):
        transport_order(["tcp"], ["shm"])
