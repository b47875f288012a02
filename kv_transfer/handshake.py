"""What two processes must agree on before a byte moves, and which transport they use. Pure.

Components are paired by name. A source may have components that the destination does not need; it says so in the log.
"""

from collections.abc import Sequence

from core.errors import NamespaceMismatch, TransferFailed
from core.kv import KVLayout
from kv_transfer.shards import assign, is_whole, mismatch

AUTO = ("shm", "tcp")
"""What ``auto`` stands for: the first that connects; shm connects only on the same host with the segment in reach."""
AUTO_ON_DEVICE = ("cuda-ipc", *AUTO)
"""The same for pools on a GPU: cuda-ipc connects on the same host with the peer's GPU in reach; tcp goes through host
memory; shm reads from a peer without a GPU."""


def check_fingerprint(ours: bytes, theirs: bytes) -> None:
    """Raise `NamespaceMismatch` unless both processes serve the same model, draft and protocol."""
    if ours != theirs:
        raise NamespaceMismatch(
            f"the peer's fingerprint is {theirs.hex()[:16]}, ours is {ours.hex()[:16]}: "
            "both sides must run the same model, revision, data type, draft and protocol version"
        )


def check_layouts(source: KVLayout, destination: KVLayout) -> tuple[str, ...]:
    """Raise `LayoutMismatch` naming the first field that differs; return the source's components that are not needed.

    Pool sizes, strides, offsets, regions, the order of axes and the share of heads may differ, as long as this one
    source holds all that the destination needs; page size and everything else that gives bytes a meaning may not.
    """
    if source.page_tokens != destination.page_tokens:
        raise mismatch("page_tokens", source.page_tokens, destination.page_tokens)
    assign([source], destination, 0)
    needed = {component.name for component in destination.components}
    return tuple(component.name for component in source.components if component.name not in needed)


def same_records(source: KVLayout, destination: KVLayout) -> bool:
    """True if every record of the destination holds the very bytes of the source's: only then digests compare."""
    return all(is_whole(source.component(c.name), c) for c in destination.components)


def transport_order(configured: Sequence[str], exported: Sequence[str], *, on_device: bool = False) -> tuple[str, ...]:
    """Return the transports to try, best first: the destination's order, without what the source does not export."""
    wanted = expand(configured, on_device=on_device)
    common = tuple(name for name in wanted if name in exported)
    if not common:
        raise TransferFailed(
            f"no KV transport in common: the destination wants {', '.join(wanted)}, "
            f"the source exports {', '.join(exported) or 'none'}"
        )
    return common


def expand(configured: Sequence[str], *, on_device: bool = False) -> tuple[str, ...]:
    """Replace ``auto`` by what it stands for (on a GPU with `on_device`) and drop repeats, keeping the order."""
    auto = AUTO_ON_DEVICE if on_device else AUTO
    names = [name for entry in configured for name in (auto if entry == "auto" else (entry,))]
    return tuple(dict.fromkeys(names))
