"""Which drafts stand. A draft is accepted iff the target's verdict at its position is that very token.

Shared noise (decision A20): the verdict is what the target would have chosen without any draft, so speculation changes
speed and nothing else. Chain rule: the verdict is drawn so that it agrees with the draft as often as possible and has
the target's distribution; its tokens depend on the drafts. Randomness is counter-based in both. Executor thread only;
knows no scheduler and no model. Where logits lie on a device, whatever it can choose is chosen there: only tokens come back.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.philox import ACCEPT_STREAM, DRAFT_STREAM, RESIDUAL_STREAM, gumbel, uniform
from engine.sampling import ChoiceParams, SampleOutput, Sampler

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Floats = npt.NDArray[np.floating]

NO_DRAFT = -1


class TokenChooser(Protocol):
    """Chooses where the logits are: `engine.runner.device_sampler.DeviceSampler`, for plain tokens."""

    def tokens(self, logits: torch.Tensor, params: ChoiceParams, positions: I64) -> torch.Tensor:
        """Return int64 [m], where the logits are, what `Sampler.choose` returns for rows without rules of the host."""
        ...


class Acceptance(Protocol):
    """A rule for choosing drafts and for judging them."""

    def chosen(self, logits: torch.Tensor, rows: I32, positions: I64) -> torch.Tensor | None:
        """Return int64 [m], where the logits are, what `rows` (some of them more than once) would choose from `logits`
        [m, vocab] if that is all that counts of them and a device knows it, else None: then `choose` and `judge` are asked.
        """
        ...

    def choose(self, index: int, logits: Floats, rows: I32, positions: I64) -> I64:
        """Return the `index`-th drafts int64 [m] for `positions`, chosen from the drafter's logits [m, vocab]."""
        ...

    def judge(self, index: int, logits: Floats, rows: I32, positions: I64, drafts: I64) -> SampleOutput:
        """Return the tokens that stand at `positions`, counted as outputs; draft `index` is accepted iff it is that token.

        `logits` [m, vocab] are the target's; `rows` are distinct; `drafts` int64 [m] hold NO_DRAFT where none is left.
        """
        ...


class SharedNoise:
    """The target's own choice, and a drafter that shares its noise."""

    def __init__(self, sampler: Sampler, device: TokenChooser | None = None) -> None:
        self._sampler = sampler
        self._device = device

    def chosen(self, logits: torch.Tensor, rows: I32, positions: I64) -> torch.Tensor | None:
        if self._device is None or self._sampler.on_host(rows, positions).any():
            return None
        params = self._sampler.params(rows)
        return None if (params.num_logprobs >= 0).any() else self._device.tokens(logits, params, positions)

    def choose(self, index: int, logits: Floats, rows: I32, positions: I64) -> I64:
        del index
        return self._sampler.choose(logits, rows, positions).astype(np.int64)

    def judge(self, index: int, logits: Floats, rows: I32, positions: I64, drafts: I64) -> SampleOutput:
        del index, drafts
        return self._sampler.settle(logits, rows, self._sampler.choose(logits, rows, positions))


class ChainRule:
    """Rejection sampling (Leviathan et al.): accept d with min(1, p(d) / q(d)), else draw from max(p - q, 0).

    Keeps q of every waiting draft on the host: k x vocabulary x 8 bytes per row at most.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._drawn_from: dict[tuple[int, int], tuple[I64, F64]] = {}

    def chosen(self, logits: torch.Tensor, rows: I32, positions: I64) -> torch.Tensor | None:
        """Return None: distributions are the host's."""
        del logits, rows, positions

    def choose(self, index: int, logits: Floats, rows: I32, positions: I64) -> I64:
        drafts = np.zeros(len(rows), np.int64)
        for i, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            ids, q = self._sampler.distribution(logits[i], row, position)
            self._drawn_from[row, index] = ids, q
            drafts[i] = self._draw(ids, q, row, position, DRAFT_STREAM)
        return drafts

    def judge(self, index: int, logits: Floats, rows: I32, positions: I64, drafts: I64) -> SampleOutput:
        tokens = self._sampler.choose(logits, rows, positions)
        for i in np.flatnonzero(drafts != NO_DRAFT).tolist():
            tokens[i] = self._verdict(index, logits[i], int(rows[i]), int(positions[i]), int(drafts[i]))
        return self._sampler.settle(logits, rows, tokens)

    def _verdict(self, index: int, logits: Floats, row: int, position: int, draft: int) -> int:
        ids, p = self._sampler.distribution(logits, row, position)
        # A drafter that chose without logits was certain of its choice.
        q_ids, q = self._drawn_from.get((row, index), (np.array([draft]), np.ones(1)))
        seed, sample = self._sampler.noise_key(row)
        chance = uniform(np.zeros(1, np.int64), seed, position, sample, ACCEPT_STREAM)[0]
        if chance * _at(q_ids, q, draft) < _at(ids, p, draft):
            return draft
        rest = np.maximum(p - _aligned(q_ids, q, ids), 0.0)
        if rest.sum() <= 0:
            # Only rounding leads here: p equals q and the draft was as good as accepted.
            return int(ids[np.argmax(p)])
        return self._draw(ids, rest, row, position, RESIDUAL_STREAM)

    def _draw(self, ids: I64, weights: F64, row: int, position: int, stream: int) -> int:
        keep = weights > 0
        ids = ids[keep]
        seed, sample = self._sampler.noise_key(row)
        return int(ids[np.argmax(np.log(weights[keep]) + gumbel(ids, seed, position, sample, stream))])


def _at(ids: I64, values: F64, token: int) -> float:
    """Return the value of one id, 0 if it is not among the ascending `ids`."""
    at = int(np.searchsorted(ids, token))
    return float(values[at]) if at < len(ids) and ids[at] == token else 0.0


def _aligned(ids: I64, values: F64, wanted: I64) -> F64:
    """Return the values at `wanted`, 0 where they are not among the ascending `ids`."""
    at = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
    return np.where(ids[at] == wanted, values[at], 0.0)


@dataclass(frozen=True, slots=True)
class Run:
    """What stands of m rows: `count[i]` tokens, of which all but the last were drafts."""

    tokens: I32  # [m, w]; -1 beyond the count
    count: I32  # [m] at least 1
    logprobs: npt.NDArray[np.float32] | None
    top_tokens: I32 | None  # [m, w, K]
    top_logprobs: npt.NDArray[np.float32] | None


@dataclass(frozen=True, slots=True)
class Judged:
    """The rows of one step that choose tokens."""

    rows: I32  # [m] engine rows, each once
    first: I64  # [m] index of the row's first logits; one more row of logits than it has drafts
    positions: I64  # [m] position of its first new token
    drafts: I64  # [m, w] NO_DRAFT behind each row's last draft, at least once


def host_of(logits: torch.Tensor) -> Floats:
    """Return logits in host memory."""
    return np.asarray(logits.detach().cpu().numpy())


def accept_runs(acceptance: Acceptance, logits: torch.Tensor, judged: Judged) -> Run:
    """Judge the drafts of all rows, position by position, and no position behind a rejected one; `logits` [n, vocab]."""
    num = 1 + (judged.drafts != NO_DRAFT).sum(1)
    column = np.arange(num.sum()) - np.repeat(np.cumsum(num) - num, num)
    at = np.repeat(judged.first, num) + column
    known = None
    if len(at) == len(logits) and (at == np.arange(len(at))).all():
        known = acceptance.chosen(logits, np.repeat(judged.rows, num), np.repeat(judged.positions, num) + column)
    if known is not None:
        each = judged.first[:, None] + np.minimum(np.arange(judged.drafts.shape[1]), num[:, None] - 1)
        return _accepted(known.cpu().numpy()[each], judged)
    host = host_of(logits)
    rows, first, positions, drafts = judged.rows, judged.first, judged.positions, judged.drafts
    tokens = np.full(drafts.shape, -1, np.int32)
    count = np.zeros(len(rows), np.int32)
    outputs: list[tuple[I64, SampleOutput]] = []
    going = np.arange(len(rows))
    for column in range(drafts.shape[1]):
        output = acceptance.judge(
            column, host[first[going] + column], rows[going], positions[going] + column, drafts[going, column]
        )
        tokens[going, column] = output.tokens
        count[going] = column + 1
        outputs.append((going, output))
        going = going[output.tokens == drafts[going, column]]
        if not len(going):
            break
    return Run(tokens, count, *_logprobs(outputs, tokens.shape))


def _accepted(verdicts: I64, judged: Judged) -> Run:
    """Return the runs that verdicts [m, w] at all positions leave: up to the first that is not the draft."""
    stands = np.logical_and.accumulate(verdicts == judged.drafts, axis=1)
    # No verdict is NO_DRAFT, which stands behind every row's last draft.
    count = 1 + stands.sum(1, dtype=np.int32)
    tokens = np.where(np.arange(verdicts.shape[1]) < count[:, None], verdicts, -1).astype(np.int32)
    return Run(tokens, count, None, None, None)


def _logprobs(
    outputs: list[tuple[I64, SampleOutput]], shape: tuple[int, ...]
) -> tuple[npt.NDArray[np.float32] | None, I32 | None, npt.NDArray[np.float32] | None]:
    """Gather what was said column by column; NaN and -1 where nothing was."""
    if all(output.logprobs is None for _, output in outputs):
        return None, None, None
    width = max(0 if output.top_tokens is None else output.top_tokens.shape[1] for _, output in outputs)
    logprobs = np.full(shape, np.nan, np.float32)
    top_tokens = np.full((*shape, width), -1, np.int32)
    top_logprobs = np.full((*shape, width), np.nan, np.float32)
    for column, (index, output) in enumerate(outputs):
        if output.logprobs is not None:
            logprobs[index, column] = output.logprobs
        if output.top_tokens is not None and output.top_logprobs is not None:
            top_tokens[index, column, : output.top_tokens.shape[1]] = output.top_tokens
            top_logprobs[index, column, : output.top_logprobs.shape[1]] = output.top_logprobs
    return logprobs, top_tokens if width else None, top_logprobs if width else None
