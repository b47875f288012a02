"""The order in which leaves of the prefix tree lose pages: least recently used first, by a lazy heap.

An entry keeps the access counter its leaf had when queued. Accesses and locks do not touch the heap; a popped entry
that is out of date is queued again or dropped. Invariant I8: every trimmable leaf is queued, once.
"""

import heapq

from engine.cache.node import Node


class LeafQueue:
    """Holds each node at most once (`Node.queued`)."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._order = 0

    def push(self, node: Node) -> None:
        """Queue a node if it is trimmable and not queued."""
        if node.queued or not node.is_trimmable:
            return
        node.queued = True
        # The running number breaks ties: nodes have no order.
        self._order += 1
        heapq.heappush(self._heap, (node.touch, self._order, node))

    def pop(self) -> Node | None:
        """Take out the least recently used trimmable leaf; None if there is none."""
        while self._heap:
            touch, _, node = heapq.heappop(self._heap)
            node.queued = False
            if touch == node.touch and node.is_trimmable:
                return node
            self.push(node)
        return None

    def clear(self) -> None:
        """Forget all entries."""
        for _, _, node in self._heap:
            node.queued = False
        self._heap.clear()

    def nodes(self) -> tuple[Node, ...]:
        """Return every queued node, out-of-date entries included."""
        return tuple(node for _, _, node in self._heap)
