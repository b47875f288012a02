"""The pure half of the `scripted` model: its configuration, its next-token rule, and the reference reply.

The rule looks only at (token, position) pairs: a script that matches the end of the context speaks, else a fixed hash
of *all* pairs picks a letter or ends the text. A wrong, missing or foreign KV entry therefore changes the text. Knows no
torch, no KV memory and no tokenizer beyond three ids.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

I64 = npt.NDArray[np.int64]

ALPHABET = b"abcdefghijklmnopqrstuvwxyz" + b"      "
"""What hashed text is made of; six of 32 choices are spaces."""
_TOKEN, _POSITION, _LANE = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_PLACE = 0xD6E8FEB86659FD93
_MIX = 0xBF58476D1CE4E5B9
_WORD = 0xFFFFFFFFFFFFFFFF


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """Where the context ends with `after` followed by a proper prefix of `emit`, the next id of `emit` comes."""

    after: tuple[int, ...]
    emit: tuple[int, ...]


class ScriptedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The `config.json` of a scripted model."""

    architectures: tuple[str, ...] = ("ScriptedForTandem",)
    model_type: str = "scripted"
    vocab_size: Annotated[int, Meta(ge=2)] = 320
    max_position_embeddings: Annotated[int, Meta(ge=1)] = 65_536
    eos_token_id: int = 258
    kv_lanes: Annotated[int, Meta(ge=1, le=4096)] = 4
    """Each token id and position is written this many times: 16 bytes of KV per token and lane."""
    mean_length: Annotated[int, Meta(ge=1)] = 48
    """Hashed text ends after this many tokens on average; the length is a function of the context."""
    step_delay_ms: Annotated[float, Meta(ge=0)] = 0.0
    """Simulated compute time of a step that has any token."""
    token_delay_us: Annotated[float, Meta(ge=0)] = 0.0
    """Simulated compute time per query token."""
    first_letter: Annotated[int, Meta(ge=0)] = 0
    """Id of byte 0: what the tokenizer has before its bytes."""
    scripts: tuple[Script, ...] = ()


def context_hash(tokens: I64, positions: I64) -> int:
    """Hash the pairs that were read back from KV, each with the place it was read at: int64 [n, lanes] each."""
    places = np.arange(tokens.shape[0], dtype=np.uint64)[:, None] * np.uint64(_PLACE)
    lanes = np.arange(tokens.shape[1], dtype=np.uint64) * np.uint64(_LANE)
    x = tokens.astype(np.uint64) * np.uint64(_TOKEN) + positions.astype(np.uint64) * np.uint64(_POSITION)
    x += places + lanes
    x ^= x >> np.uint64(29)
    x *= np.uint64(_MIX)
    x ^= x >> np.uint64(32)
    return finish(int(x.sum(dtype=np.uint64)), tokens.shape[0])


def term(token: int, position: int, lanes: int) -> int:
    """Return what one token, stored and read at its own position, adds to the hash sum (64-bit)."""
    total = 0
    for lane in range(lanes):
        x = (token * _TOKEN + position * (_POSITION + _PLACE) + lane * _LANE) & _WORD
        x ^= x >> 29
        x = (x * _MIX) & _WORD
        total += x ^ (x >> 32)
    return total & _WORD


def finish(total: int, length: int) -> int:
    """Turn a hash sum over `length` tokens into the context hash."""
    x = (total + length * _LANE) & _WORD
    x ^= x >> 31
    x = (x * _TOKEN) & _WORD
    return x ^ (x >> 30)


class NextToken:
    """The rule of one configuration: the first and the second choice after a context."""

    def __init__(self, config: ScriptedConfig) -> None:
        self._config = config
        self._patterns = [(_words(s.after + s.emit), len(s.after), s.emit) for s in config.scripts]
        self._letters = [byte + config.first_letter for byte in ALPHABET]
        self.tail_tokens = max((len(s.after) + len(s.emit) for s in config.scripts), default=0)
        """How many of the last tokens of a context `choose` needs to see."""

    def choose(self, tail: Sequence[int], digest: int) -> tuple[int, int]:
        """Return (first, second) choice, never equal; `tail` are the last tokens, `digest` the context hash."""
        letters = self._letters
        letter = letters[(digest >> 8) % len(letters)]
        other = letters[(digest >> 8) % len(letters) - 1]
        first = self._scripted(_words(tail))
        if first is None:
            first = self._config.eos_token_id if digest % self._config.mean_length == 0 else letter
        if first != letter:
            return first, letter
        return first, other if other != letter else letters[0]

    def _scripted(self, tail: bytes) -> int | None:
        for words, start, emit in self._patterns:
            for said in range(len(emit), -1, -1):
                if tail.endswith(words[: 8 * (start + said)]) and start + said:
                    return emit[said] if said < len(emit) else self._config.eos_token_id
        return None


def _words(tokens: Sequence[int]) -> bytes:
    """Eight bytes per token. The first byte of a match is always a token border: high bytes of ids are zero."""
    return np.asarray(tokens, dtype=">i8").tobytes()


def scripted_reply(
    config: ScriptedConfig,
    token_ids: Sequence[int],
    max_tokens: int,
    *,
    min_tokens: int = 0,
    ignore_eos: bool = False,
) -> list[int]:
    """Return what the model says after `token_ids` at temperature 0: the truth that tests compare with.

    The list ends with the end-of-text id if that ended it; `ignore_eos` lets the text go on behind it.
    """
    rule = NextToken(config)
    context = list(token_ids)
    total = 0
    for position, token in enumerate(context):
        total += term(token, position, config.kv_lanes)
    reply: list[int] = []
    while len(reply) < max_tokens:
        tail = context[max(0, len(context) - rule.tail_tokens) :]
        first, second = rule.choose(tail, finish(total, len(context)))
        masked = first == config.eos_token_id and len(reply) < min_tokens
        token = second if masked else first
        reply.append(token)
        if token == config.eos_token_id and not ignore_eos:
            break
        total += term(token, len(context), config.kv_lanes)
        context.append(token)
    return reply
