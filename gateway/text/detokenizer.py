"""Incremental detokenization of one sample: token ids in, text out, each character exactly once.

The text of all `push` calls plus `finish` equals decoding the whole sequence at once, however the ids are cut into
pushes. Cost is linear in the output. Knows no stop strings and no finish reasons.
"""

import codecs
from collections.abc import Sequence

from gateway.text.vocabulary import Vocabulary, hidden_ids

_NONE = frozenset[int]()
_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Holds back the bytes of an unfinished character; broken bytes become U+FFFD as in whole-text decoding."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        skip_special: bool = True,
        silent: frozenset[int] = frozenset(),
        continues: bool = False,
    ) -> None:
        """`silent` ids (end-of-text, stop ids) never show; `continues`: the text goes on after a prompt, so a leading space is kept."""
        self._bytes = vocabulary.token_bytes
        self._text = vocabulary.token_text
        self._size = vocabulary.size
        self._hidden = hidden_ids(vocabulary.special_ids, _NONE, silent) if skip_special else silent
        self._decoder = _utf8_decoder(errors="replace")
        self._strip_next = vocabulary.rules.strips_leading_space and not continues
        self._plain = not self._strip_next
        """True while no byte is pending and no leading space is to be stripped: single tokens come from the table."""

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids and return the text that is certain by now."""
        if self._plain and len(ids) == 1:
            token = ids[0]
            if token in self._hidden or token >= self._size:
                return ""
            text = self._text[token]
            if text is not None:
                return text
        hidden, size, table = self._hidden, self._size, self._bytes
        data = b"".join([table[token] for token in ids if token not in hidden and token < size])
        text = self._decoder.decode(data)
        self._plain = not self._decoder.getstate()[0]
        return self._stripped(text) if self._strip_next else text

    def finish(self) -> str:
        """Return what an unfinished character at the end becomes; nothing may be pushed afterwards."""
        text = self._decoder.decode(b"", final=True)
        return self._stripped(text) if self._strip_next else text

    def _stripped(self, text: str) -> str:
        if not text:
            self._plain = False
            return text
        self._strip_next = False
        return text.removeprefix(" ")
