"""The text side of one sample: deltas of token ids in, pieces of visible text out, with exact token counts.

Composes detokenizer and stop scanner and decides where the output ends. Knows no wire format and no protocol.
"""

from collections.abc import Sequence

from core.request import FinishReason
from gateway.generation import Delta
from gateway.text.detokenizer import Detokenizer
from gateway.text.piece import Piece
from gateway.text.stop import StopScanner
from gateway.text.vocabulary import Vocabulary


class SampleText:
    """Turns the deltas of one sample into pieces; the last piece carries `finish`, after it `push` must not be called.

    Tokens after a completed stop string are dropped and counted in `num_surplus`; the token that completes it counts
    as output. A stop id or end-of-text id counts, but says nothing. Stop strings are looked for only in text of
    tokens after the first `min_tokens`.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        stops: Sequence[str] = (),
        silent: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        skip_special: bool = True,
        continues: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(vocabulary, skip_special=skip_special, silent=silent, continues=continues)
        self._scanner = StopScanner(stops) if stops else None
        self._min_tokens = min_tokens
        self.num_tokens = 0
        """Output tokens counted so far."""
        self.num_surplus = 0
        """Tokens received after a stop string had completed."""

    def push(self, delta: Delta) -> Piece:
        """Take one delta; the piece may be empty while a character or a possible stop string is unfinished."""
        ids = delta.token_ids
        if self._scanner is None:
            self.num_tokens += len(ids)
            text = self._detokenizer.push(ids)
            if delta.finish is not None:
                text += self._detokenizer.finish()
            return Piece(text, len(ids), delta.logprobs, delta.finish)
        return self._push_scanned(delta, self._scanner)

    def _push_scanned(self, delta: Delta, scanner: StopScanner) -> Piece:
        parts: list[str] = []
        for taken, token in enumerate(delta.token_ids, start=1):
            self.num_tokens += 1
            text = self._detokenizer.push((token,))
            if self.num_tokens <= self._min_tokens:
                parts.append(text)
                continue
            parts.append(scanner.push(text))
            if scanner.matched is not None:
                self.num_surplus += len(delta.token_ids) - taken
                return _matched(parts, taken, delta, scanner)
        finish = delta.finish
        if finish is not None:
            # An unfinished character may still complete a stop string that holds U+FFFD.
            parts.append(scanner.push(self._detokenizer.finish()))
            if scanner.matched is not None:
                return _matched(parts, len(delta.token_ids), delta, scanner)
            parts.append(scanner.finish())
        return Piece("".join(parts), len(delta.token_ids), delta.logprobs, finish)


def _matched(parts: Sequence[str], taken: int, delta: Delta, scanner: StopScanner) -> Piece:
    return Piece("".join(parts), taken, delta.logprobs[:taken], FinishReason.STOP, matched_stop=scanner.matched)
