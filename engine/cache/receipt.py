"""What the prefix tree hands to a sequence: the right to unlock, the outcome of a publish, and a row for the audit."""

from dataclasses import dataclass

from engine.cache.node import Node
from engine.cache.page_state import Pages
from engine.events import SeqId


class Receipt:
    """A lock on the first `num_pages` pages of one path; `PrefixTree.unlock` or `publish` uses it up, exactly once.

    Only the tree reads `node` and `generation`.
    """

    __slots__ = ("generation", "node", "num_pages")

    def __init__(self, node: Node, num_pages: int, generation: int) -> None:
        self.node = node
        self.num_pages = num_pages
        self.generation = generation

    def last_node(self) -> Node:
        """Return the node that holds the last locked page (the root if there is none).

        Splits may have moved it above `node`, never below.
        """
        node = self.node
        while node.parent is not None and node.depth >= self.num_pages:
            node = node.parent
        return node


@dataclass(frozen=True, slots=True)
class Published:
    """Outcome of `PrefixTree.publish`; positions count pages from the start of the sequence."""

    start: int
    """First position this call was about: what the given receipt covered."""
    canonical_pages: Pages
    """int32[n]: what the sequence's table must hold at positions start .. start+n-1 from now on."""
    duplicate_pages: Pages
    """The sequence's own pages of the first of these positions, which the tree had already: free them by fence."""
    receipt: Receipt
    """Replaces the given one; covers everything that is in the tree now."""


@dataclass(frozen=True, slots=True)
class HeldRow:
    """One live sequence, as the audit needs it."""

    owner: SeqId
    pages: Pages
    """All pages of its table, in order: locked tree pages first, then its own (PRIVATE, LANDING or LOADING)."""
    receipt: Receipt | None
