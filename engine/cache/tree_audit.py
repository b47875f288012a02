"""Checks of the prefix tree's invariants, alone and together with the pool and the live sequences.

I1 and I2 are the pool's (`pool_audit`). I3: parents and kids agree, positions join. I4: locks never grow along a path.
I5: lock counts are the sum of the receipts. I7: a sequence's table holds the tree's pages as far as its receipt goes and
its own pages after it. I8: every leaf that can lose pages is queued. I12: access counters never exceed the clock and
never grow along a path (an access touches the whole path above it, so leaves are the oldest).
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.cache.node import Node
from engine.cache.page_pool import PagePool
from engine.cache.page_state import Pages
from engine.cache.receipt import HeldRow, Receipt
from engine.events import SeqId


@dataclass(frozen=True, slots=True)
class TreeView:
    """What a tree believes of itself."""

    root: Node
    nodes: tuple[Node, ...]
    """All matchable nodes, the root included."""
    flushed: tuple[Node, ...]
    """Nodes of before a flush that still have locked pages."""
    orphans: tuple[Pages, ...]
    queued: tuple[Node, ...]
    receipts: tuple[Receipt, ...]
    generation: int
    clock: int
    num_pages: int
    num_locked: int


def audit_tree(view: TreeView, pool: PagePool, rows: Sequence[HeldRow] | None) -> list[str]:
    """Return one sentence per violation; see `PrefixTree.audit`."""
    nodes = (*view.nodes, *view.flushed)
    pages = [page for node in nodes for page in node.pages.tolist()] + [
        page for orphans in view.orphans for page in orphans.tolist()
    ]
    found = [*_audit_shape(view), *_audit_locks(view, nodes), *_audit_order(view)]
    if len(pages) != view.num_pages:
        found.append(f"I2 the tree counts {view.num_pages} pages and holds {len(pages)}")
    if sum(node.num_locked for node in nodes) != view.num_locked:
        found.append(f"I2 the tree counts {view.num_locked} locked pages and holds another number")
    owned: dict[SeqId, list[int]] | None = None
    if rows is not None:
        owned = defaultdict(list)
        for row in rows:
            locked = row.receipt.num_pages if row.receipt is not None else 0
            owned[row.owner].extend(row.pages[locked:].tolist())
        found += _audit_rows(view, rows)
    return found + pool.audit(owned, pages)


def _audit_shape(view: TreeView) -> list[str]:
    found: list[str] = []
    for node in view.nodes:
        if not len(node.keys) == len(node.pages) == len(node.locks):
            found.append(f"I3 a node at {node.depth} has {len(node.keys)} hashes and {len(node.pages)} pages")
        if not node.keys and node is not view.root:
            found.append(f"I3 an empty node at {node.depth} is still in the tree")
        for key, kid in node.kids.items():
            if kid.parent is not node or kid.keys[:1] != [key] or kid.depth != node.end:
                found.append(f"I3 a kid at {kid.depth} does not belong below its parent, which ends at {node.end}")
    return found


def _audit_locks(view: TreeView, nodes: Sequence[Node]) -> list[str]:
    found: list[str] = []
    expected = {id(node): np.zeros(len(node.keys), np.int64) for node in nodes}
    for receipt in view.receipts:
        node: Node | None = receipt.node
        covered = 0
        while node is not None:
            if node.depth < receipt.num_pages and node.keys and id(node) in expected:
                high = min(receipt.num_pages, node.end) - node.depth
                expected[id(node)][:high] += 1
                covered += high
            node = node.parent
        if covered != receipt.num_pages:
            found.append(f"I5 a receipt of {receipt.num_pages} pages finds {covered} of them in the tree")
    for node in nodes:
        if not np.array_equal(expected[id(node)], node.locks):
            found.append(f"I5 locks at {node.depth} are {node.locks.tolist()}, receipts sum to {expected[id(node)]}")
        if node.num_locked != np.count_nonzero(node.locks):
            found.append(f"I4 a node at {node.depth} counts {node.num_locked} locked pages wrongly")
        path = node.locks if node.parent is None else np.concatenate((node.parent.locks[-1:], node.locks))
        if bool((np.diff(path) > 0).any()) or bool((node.locks < 0).any()):
            found.append(f"I4 locks grow along the path at {node.depth}: {path.tolist()}")
    return found


def _audit_order(view: TreeView) -> list[str]:
    found: list[str] = []
    queued = Counter(map(id, view.queued))
    for node in view.nodes:
        if queued[id(node)] != int(node.queued):
            found.append(f"I8 a node at {node.depth} is queued {queued[id(node)]} times and says {node.queued}")
        if node.is_trimmable and not node.queued:
            found.append(f"I8 a leaf at {node.depth} with unlocked pages is not queued")
        if node.touch > view.clock:
            found.append(f"I12 a node at {node.depth} was touched in the future")
        if node.parent is not None and node.touch > node.parent.touch:
            found.append(f"I12 a node at {node.depth} is newer than its parent")
    return found


def _audit_rows(view: TreeView, rows: Sequence[HeldRow]) -> list[str]:
    found: list[str] = []
    held = [row.receipt for row in rows if row.receipt is not None]
    if len(set(held)) != len(held):
        found.append("I5 two sequences hold the same receipt")
    if lost := len(set(view.receipts) - set(held)):
        found.append(f"I5 {lost} receipts are held by no sequence (leak)")
    for row in rows:
        if row.receipt is None:
            continue
        if row.receipt not in view.receipts:
            found.append(f"I5 sequence {row.owner} holds a receipt that is used up")
            continue
        canonical = _pages_of(row.receipt)
        if canonical != row.pages[: row.receipt.num_pages].tolist():
            found.append(f"I7 the table of sequence {row.owner} differs from the tree's pages {canonical}")
    return found


def _pages_of(receipt: Receipt) -> list[int]:
    """Return the pages a receipt locks, in order."""
    parts: list[list[int]] = []
    node: Node | None = receipt.node
    while node is not None:
        if node.depth < receipt.num_pages:
            parts.append(node.pages[: receipt.num_pages - node.depth].tolist())
        node = node.parent
    return [page for part in reversed(parts) for page in part]
