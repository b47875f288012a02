"""The last tokens of every row, by position: what a model that hashes n-grams needs to know from before a chunk.

A ring per row, so a rollback of drafted tokens is nothing: later tokens overwrite the slots of rejected ones.
"""

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


class TokenHistory:
    """Rings of `num_rows` rows that always know the `width` tokens before the next position.

    `ahead` is the most tokens of a row that one step may write and a later step take back.
    """

    def __init__(self, num_rows: int, width: int, ahead: int) -> None:
        self._width = width
        self._slots = width + max(1, ahead)
        self._tokens = np.full((num_rows, self._slots), -1, np.int64)

    def reset(self, row: int, tokens: I32, length: int) -> None:
        """Begin a row whose next token has position `length`; `tokens` holds at least those before it."""
        first = max(0, length - self._slots)
        self._tokens[row] = -1
        self._tokens[row, np.arange(first, length) % self._slots] = tokens[first:length]

    def before(self, rows: I32, starts: I64) -> I64:
        """Return [b, width]: the tokens before position `starts[i]` of each row, oldest first, -1 before position 0."""
        positions = starts[:, None] + np.arange(-self._width, 0)
        found = self._tokens[rows[:, None], positions % self._slots]
        return np.where(positions < 0, -1, found)

    def write(self, rows: I32, q_start: I32, positions: I64, tokens: I64) -> None:
        """Note the tokens of a step, [t] in row order with their absolute positions."""
        lengths = np.diff(q_start)
        # Of a chunk longer than the ring only the end stays.
        kept = np.arange(len(tokens)) >= np.repeat(q_start[1:] - self._slots, lengths)
        owner = np.repeat(rows, lengths)[kept]
        self._tokens[owner, positions[kept] % self._slots] = tokens[kept]
