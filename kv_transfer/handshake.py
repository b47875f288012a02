"""What two processes must agree on before a byte moves, and which transport they use. Pure.

Components are paired by name. A source may have components that the destination does not need; it says so in the log.
"""

from collections.abc import Sequence

from core.errors import NamespaceMismatch, TransferFailed
from core.kv import Component, KVLayout

AUTO = ("shm", "tcp")
"""What ``auto`` stands for: the first that connects; shm connects only on the same host with the segment in reach."""
_SEMANTIC = ("kind", "record_bytes", "layers", "heads", "head_dim", "elem", "capacity_tokens")


def check_fingerprint(ours: bytes, theirs: bytes) -> None:
    """Raise `NamespaceMismatch` unless both processes serve the same model, draft and protocol."""
    if ours != theirs:
        raise NamespaceMismatch(
            f"the peer's fingerprint is {theirs.hex()[:16]}, ours is {ours.hex()[:16]}: "
            "both sides must run the same model, revision, data type, draft and protocol version"
        )


def check_layouts(source: KVLayout, destination: KVLayout) -> tuple[str, ...]:
    """Raise `NamespaceMismatch` naming the first differing field; return the source's components that are not needed.

    Pool sizes, strides, offsets and regions may differ; page size and everything that gives bytes a meaning may not.
    """
    if source.page_tokens != destination.page_tokens:
        raise _mismatch("page_tokens", source.page_tokens, destination.page_tokens)
    theirs = {component.name: component for component in source.components}
    for component in destination.components:
        if component.name not in theirs:
            raise NamespaceMismatch(f"KV layouts differ at components[{component.name}]: the source does not have it")
        _check_component(theirs.pop(component.name), component)
    return tuple(theirs)


def transport_order(configured: Sequence[str], exported: Sequence[str]) -> tuple[str, ...]:
    """Return the transports to try, best first: the destination's order, without what the source does not export."""
    wanted = expand(configured)
    common = tuple(name for name in wanted if name in exported)
    if not common:
        raise TransferFailed(
            f"no KV transport in common: the destination wants {', '.join(wanted)}, "
            f"the source exports {', '.join(exported) or 'none'}"
        )
    return common


def expand(configured: Sequence[str]) -> tuple[str, ...]:
    """Replace ``auto`` by what it stands for and drop repeats, keeping the order."""
    names = [name for entry in configured for name in (AUTO if entry == "auto" else (entry,))]
    return tuple(dict.fromkeys(names))


def _check_component(source: Component, destination: Component) -> None:
    for field in _SEMANTIC:
        ours, theirs = getattr(destination, field), getattr(source, field)
        if ours != theirs:
            raise _mismatch(f"components[{destination.name}].{field}", theirs, ours)


def _mismatch(path: str, source: object, destination: object) -> NamespaceMismatch:
    return NamespaceMismatch(f"KV layouts differ at {path}: the source has {source}, the destination {destination}")
