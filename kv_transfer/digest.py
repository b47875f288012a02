"""crc32 digests of page and row records: what the source announces and the destination checks.

One number per page over its paged components in the source's layout order, and one per row component in that order.
Independent of page ids. Called on a thread of its own: zlib works without the interpreter lock.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence

from core.kv import Component, ComponentKind, KVLayout
from kv_transfer.views import Bytes


def paged_names(layout: KVLayout) -> tuple[str, ...]:
    """Names of the paged components, in layout order."""
    return tuple(c.name for c in layout.components if c.kind is ComponentKind.PAGED)


def row_names(layout: KVLayout) -> tuple[str, ...]:
    """Names of the components that belong to a row, in layout order."""
    return tuple(c.name for c in layout.components if c.kind is not ComponentKind.PAGED)


def page_digests(
    layout: KVLayout, names: Sequence[str], pages: Iterable[int], views: Mapping[int, Bytes]
) -> tuple[int, ...]:
    """Return the crc32 of each page over the named components."""
    components = [layout.component(name) for name in names]
    digests: list[int] = []
    for page in pages:
        crc = 0
        for component in components:
            crc = zlib.crc32(_record(component, page, views), crc)
        digests.append(crc)
    return tuple(digests)


def row_digests(layout: KVLayout, names: Sequence[str], row: int, views: Mapping[int, Bytes]) -> tuple[int, ...]:
    """Return the crc32 of each named component's record of one row."""
    return tuple(zlib.crc32(_record(layout.component(name), row, views)) for name in names)


def _record(component: Component, index: int, views: Mapping[int, Bytes]) -> memoryview:
    start = component.offset + index * component.stride_bytes
    return views[component.region][start : start + component.record_bytes].data
