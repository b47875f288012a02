"""Pages of trees that were flushed: still locked ones, and those that wait to be given back.

Nobody matches them any more. A page becomes an orphan when its last lock ends, and leaves with the next eviction.
"""

from engine.cache.node import Node
from engine.cache.page_state import Pages


class FlushedPages:
    """Nodes that keep locked pages only, and orphaned pages."""

    def __init__(self) -> None:
        self._nodes: dict[Node, None] = {}
        self._orphans: list[Pages] = []

    def add(self, node: Node) -> None:
        """Take over a node of a tree that is flushed now."""
        self._nodes[node] = None
        self.collect(node)

    def collect(self, node: Node) -> None:
        """Orphan the pages of a node that have no lock any more."""
        pages = node.trim(len(node.keys) - node.num_locked)[1]
        if len(pages):
            self._orphans.append(pages)
        if not node.keys:
            del self._nodes[node]

    def take(self, count: int) -> list[Pages]:
        """Give back up to `count` orphans."""
        taken: list[Pages] = []
        need = count
        while need > 0 and self._orphans:
            pages = self._orphans.pop()
            if len(pages) > need:
                self._orphans.append(pages[need:])
            taken.append(pages[:need])
            need -= len(taken[-1])
        return taken

    def nodes(self) -> tuple[Node, ...]:
        """Return the nodes that still have locked pages."""
        return tuple(self._nodes)

    def orphans(self) -> tuple[Pages, ...]:
        """Return the pages that wait to be given back."""
        return tuple(self._orphans)
