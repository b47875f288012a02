# pyright: basic
"""Public kernels that do equal work, for the ops that have them. A peer gets inputs in its own format, made untimed."""

from collections.abc import Callable

from benchmarks.kernel_case import Inputs

Peer = Callable[[list[Inputs], dict[str, int]], float]
"""Returns microseconds for the inputs of a case at a size."""

PEERS: dict[str, dict[str, Peer]] = {}
