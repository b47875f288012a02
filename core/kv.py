"""How KV lies in memory, as plain numbers: layout components, compatibility, and the canonical encoding.

The engine exports a `KVLayout`; the transfer layer plans copies from two of them; neither knows the other.
A layout is a list of components paired by name, never by position. Units: bytes, tokens.
"""

import enum
import hashlib
from typing import Literal

import msgspec

from core.errors import NamespaceMismatch

LAYOUT_VERSION = 1


class ComponentKind(enum.StrEnum):
    """What one record of a component belongs to."""

    PAGED = "paged"
    """One record per page; addressed by page id; may live in the prefix tree."""
    RING = "ring"
    """One record per row: a position-addressed ring of the last `window` tokens (position mod capacity)."""
    STATE = "state"
    """One record per row: recurrent or compressor state at exactly the committed length."""


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """One group of a STATE record that tensor parallelism cuts on its own, in bytes of the group as a whole."""

    total: int
    first: int
    nbytes: int


class Component(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a sequence's KV. Record i lies at `offset + i * stride_bytes` of region `region`."""

    name: str
    kind: ComponentKind
    record_bytes: int
    """Bytes that a hand-over moves per record (all layers of the component lie inside one record)."""
    num_records: int
    """Pages or rows. Pools of peers may differ here."""
    stride_bytes: int
    offset: int = 0
    region: int = 0
    """Which registered region of the worker holds it."""
    layers: tuple[str, ...] = ()
    heads: int = 0
    """KV heads in this worker's records; 0: a flat record that every tensor-parallel rank holds whole."""
    total_heads: int = 0
    """KV heads of the model, from its configuration; 0: `heads` are all there are."""
    first_head: int = 0
    """Which of them is the first one here."""
    axes: Literal["HND", "NHD"] = "HND"
    """A record is [layers, key and value, then heads, tokens, head_dim] or [..., tokens, heads, head_dim]."""
    shards: tuple[Shard, ...] = ()
    """STATE only: the groups whose parts follow each other in the record; empty: it is not cut."""
    head_dim: int = 0
    elem: str = ""
    """Element type as the engine names it, e.g. ``f32``; part of the semantics."""
    capacity_tokens: int = 0
    """Tokens per record: page size, or ring capacity; 0 for STATE."""


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """All components of one worker. `page_tokens` must be equal on both sides."""

    version: int = LAYOUT_VERSION
    page_tokens: int
    components: tuple[Component, ...]

    def component(self, name: str) -> Component:
        """Return the component of that name; KeyError if there is none."""
        for component in self.components:
            if component.name == name:
                return component
        raise KeyError(name)

    @property
    def has_row_state(self) -> bool:
        """True if something per row (ring or state) must travel with a hand-over, and page hits alone are no prefix."""
        return any(component.kind is not ComponentKind.PAGED for component in self.components)

    def encode(self) -> bytes:
        """Canonical msgpack (sorted keys)."""
        return _ENCODER.encode(self)

    def digest(self) -> bytes:
        """SHA-256 over the semantic part: everything but addresses, strides and pool sizes."""
        plain = [
            (c.name, c.kind.value, c.record_bytes, list(c.layers), c.heads, c.head_dim, c.elem, c.capacity_tokens)
            for c in sorted(self.components, key=lambda c: c.name)
        ]
        return hashlib.sha256(_ENCODER.encode([self.version, self.page_tokens, plain])).digest()


_ENCODER = msgspec.msgpack.Encoder(order="sorted")
_DECODER = msgspec.msgpack.Decoder(KVLayout)


class _Head(msgspec.Struct):
    """The part of an encoded layout that every version has."""

    version: int


_HEAD = msgspec.msgpack.Decoder(_Head)


def decode_layout(data: bytes) -> KVLayout:
    """Decode a peer's layout; raises `NamespaceMismatch` if it is malformed or of another version."""
    try:
        # The version first: what another version says need not be readable as this one.
        if (found := _HEAD.decode(data).version) != LAYOUT_VERSION:
            raise NamespaceMismatch(f"the peer's KV layout has version {found}, ours is {LAYOUT_VERSION}")
        layout = _DECODER.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise NamespaceMismatch(f"the peer's KV layout cannot be read: {error}") from error
    return layout


class PageRef(msgspec.Struct, frozen=True, array_like=True):
    """A page as it is named on the wire: index and allocation epoch (u32, bumped at every allocation)."""

    page: int
    epoch: int
