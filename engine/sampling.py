"""Token choice (decision A20) on the executor: per-row state, logit processing, and the counter-based Gumbel argmax.

Order, as in vLLM: log-probabilities from the raw logits; then logit bias, min-tokens mask, grammar, penalties (repetition over
prompt and outputs, frequency and presence over outputs), temperature, min-p, top-k, top-p, noise. Every row is worked
on alone, so its result never depends on the batch. Precision: logits are processed in the type the model gave
(float32 or float64); scaled logit + noise is summed and compared in float64; ties go to the lowest id. Top-k and top-p
order tokens by (logit descending, id ascending); top-p keeps the shortest prefix whose float64 mass reaches p.
Runs on host memory; knows no scheduler, no request and no stop rule except the ids to mask below `min_tokens`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.philox import GUMBEL_MAX, gumbel
from engine.plan import RowInit

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Floats = npt.NDArray[np.floating]
Barrier = Callable[[int, int], F32 | None]
"""(row, position) -> float32 [vocab], added to the logits: -inf for what the row's grammar lets not stand there, else 0;
None: anything may. On a device that samples, the bits of the same mask go to where the logits are."""

GREEDY_BELOW = 1e-5
"""Temperatures below this are plain argmax: division by them would overflow float32."""
_NEAR = 3.0
"""Logits this close to the top are perturbed first; the best of them bounds who else can win."""
_WHOLE = 2048
"""Candidate sets up to this size are perturbed in one pass."""
_NUCLEUS = 12.0
"""First guess of how far below the top the nucleus of top-p can reach."""


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """What was chosen for m rows. The optional arrays are None if no row asked; rows that did not ask hold NaN/-1."""

    tokens: I32  # [m]
    logprobs: F32 | None = None  # [m] of the chosen token, natural log of the raw softmax
    top_tokens: I32 | None = None  # [m, K], most likely first; -1 padded
    top_logprobs: F32 | None = None  # [m, K]; NaN padded


@dataclass(frozen=True, slots=True)
class _RowRules:
    """The rare, irregular part of a row's parameters."""

    bias_ids: I64
    bias: F64
    masked_ids: I64


@dataclass(frozen=True, slots=True)
class ChoiceParams:
    """What a device needs to choose tokens for m rows."""

    temperature: F64
    min_p: F64
    top_k: I64
    top_p: F64
    seed: npt.NDArray[np.uint64]
    sample_index: I64
    num_logprobs: I32

    @property
    def restricted(self) -> npt.NDArray[np.bool_]:
        """Return [m]: rows that may not choose among all ids."""
        limits = (self.min_p > 0) | (self.top_k > 0) | (self.top_p < 1)
        return limits & (self.temperature >= GREEDY_BELOW)


_NO_RULES = _RowRules(np.zeros(0, np.int64), np.zeros(0, np.float64), np.zeros(0, np.int64))


class PenaltyCounts:
    """Token histograms of the rows that have penalties: outputs counted, prompt and outputs marked as seen."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._slot = np.full(num_rows, -1, np.int32)
        self._free: list[int] = []
        self._outputs = np.zeros((0, vocab_size), np.int32)
        self._seen = np.zeros((0, vocab_size), np.bool_)

    def reset(self, row: int, token_ids: I32, num_prompt_tokens: int) -> None:
        """Count a row's tokens anew; `token_ids` int32 [n] are its prompt, then its outputs."""
        slot = int(self._slot[row])
        if slot < 0:
            slot = self._slot[row] = self._take()
        self._outputs[slot] = np.bincount(token_ids[num_prompt_tokens:], minlength=self._vocab_size)
        self._seen[slot] = False
        self._seen[slot][token_ids] = True

    def drop(self, row: int) -> None:
        """Give back the histogram of a row that no longer needs one."""
        if self._slot[row] >= 0:
            self._free.append(int(self._slot[row]))
            self._slot[row] = -1

    def add(self, row: int, token: int) -> None:
        """Count one more output token of a row that has a histogram."""
        slot = self._slot[row]
        self._outputs[slot, token] += 1
        self._seen[slot, token] = True

    def outputs(self, row: int) -> I32:
        """Return int32 [vocab]: how often each token is among the row's outputs. A view; do not modify."""
        return self._outputs[self._slot[row]]

    def seen(self, row: int) -> npt.NDArray[np.bool_]:
        """Return bool [vocab]: tokens in prompt or outputs. A view; do not modify."""
        return self._seen[self._slot[row]]

    def _take(self) -> int:
        if not self._free:
            used = len(self._outputs)
            grown = max(4, 2 * used)
            self._outputs = np.concatenate([self._outputs, np.zeros((grown - used, self._vocab_size), np.int32)])
            self._seen = np.concatenate([self._seen, np.zeros((grown - used, self._vocab_size), np.bool_)])
            self._free.extend(range(grown - 1, used - 1, -1))
        return self._free.pop()


class Sampler:
    """Chooses tokens for rows that were set up with `set_row`. Owned by the executor thread."""

    def __init__(self, num_rows: int, vocab_size: int, barrier: Barrier | None = None) -> None:
        """`barrier` is asked for rows that were set up with a grammar."""
        self.vocab_size = vocab_size
        self._barrier = barrier
        self._has_grammar = np.zeros(num_rows, np.bool_)
        self._temperature = np.zeros(num_rows, np.float64)
        self._top_k = np.zeros(num_rows, np.int64)
        self._top_p = np.ones(num_rows, np.float64)
        self._min_p = np.zeros(num_rows, np.float64)
        self._repetition = np.ones(num_rows, np.float64)
        self._frequency = np.zeros(num_rows, np.float64)
        self._presence = np.zeros(num_rows, np.float64)
        self._seed = np.zeros(num_rows, np.uint64)
        self._sample_index = np.zeros(num_rows, np.int64)
        self._num_logprobs = np.full(num_rows, -1, np.int32)
        self._masked_before = np.zeros(num_rows, np.int64)
        self._penalized = np.zeros(num_rows, np.bool_)
        self._plain = np.ones(num_rows, np.bool_)
        self._biased = np.zeros(num_rows, np.bool_)
        self._rules = [_NO_RULES] * num_rows
        self._counts = PenaltyCounts(num_rows, vocab_size)

    def set_row(self, init: RowInit) -> None:
        """Take over a row for a new owner (or the same one at a new length); nothing of the last owner remains."""
        row, params = init.row, init.sampling
        self._temperature[row] = params.temperature
        self._top_k[row] = params.top_k
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._repetition[row] = params.repetition_penalty
        self._frequency[row] = params.frequency_penalty
        self._presence[row] = params.presence_penalty
        self._seed[row] = params.seed & 0xFFFFFFFFFFFFFFFF
        self._sample_index[row] = params.sample_index
        self._num_logprobs[row] = params.num_logprobs
        masked = init.masked_until_min if init.min_tokens > 0 else ()
        # Output number k stands at position num_prompt_tokens + k, so "fewer than min" is a bound on the position.
        self._masked_before[row] = init.num_prompt_tokens + init.min_tokens if masked else 0
        self._rules[row] = _NO_RULES
        if params.logit_bias or masked:
            self._rules[row] = _RowRules(
                np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias)),
                np.fromiter(params.logit_bias.values(), np.float64, len(params.logit_bias)),
                np.array(masked, np.int64),
            )
        penalized = params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
        self._penalized[row] = penalized
        if penalized:
            self._counts.reset(row, np.frombuffer(init.token_ids, np.int32), init.num_prompt_tokens)
        else:
            self._counts.drop(row)
        self._has_grammar[row] = bool(init.grammar)
        self._biased[row] = bool(params.logit_bias)
        changed = bool(penalized or params.logit_bias or masked or init.grammar)
        self._plain[row] = params.temperature < GREEDY_BELOW and not changed and params.num_logprobs < 0

    def sample(self, logits: torch.Tensor, rows: I32, positions: I64) -> SampleOutput:
        """Choose one token per row.

        `logits` [m, vocab] float32 or float64, not modified; `rows` int32 [m] are distinct engine rows;
        `positions` int64 [m] are the absolute positions of the tokens to be chosen (= tokens before them).
        """
        host = _on_host(logits)
        return self.settle(host, rows, self.choose(host, rows, positions))

    def choose(self, host: Floats, rows: I32, positions: I64) -> I32:
        """As `sample` on logits in host memory, for tokens that may yet be rejected: nothing is counted."""
        tokens = np.argmax(host, axis=1).astype(np.int32) if len(rows) else np.zeros(0, np.int32)
        for i in np.flatnonzero(~self._plain[rows]).tolist():
            tokens[i] = self._choose(host[i], int(rows[i]), int(positions[i]), int(tokens[i]))
        return tokens

    def settle(self, host: Floats, rows: I32, tokens: I32) -> SampleOutput:
        """Count `tokens` [m] as outputs of their rows and return them with what the rows asked for."""
        if self._plain[rows].all():
            return SampleOutput(tokens)
        for i in np.flatnonzero(self._penalized[rows]).tolist():
            self._counts.add(int(rows[i]), int(tokens[i]))
        if (self._num_logprobs[rows] < 0).all():
            return SampleOutput(tokens)
        return self._with_logprobs(host, rows, tokens)

    def on_host(self, rows: I32, positions: I64) -> npt.NDArray[np.bool_]:
        """Return [m]: rows with rules that a device does not know: bias, masked ids, penalties, a grammar."""
        rules = self._biased[rows] | self._penalized[rows] | self._has_grammar[rows]
        return rules | (positions < self._masked_before[rows])

    def params(self, rows: I32) -> ChoiceParams:
        """Return what else decides a row's token; arguments as in `sample`."""
        return ChoiceParams(
            temperature=self._temperature[rows],
            min_p=self._min_p[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            seed=self._seed[rows],
            sample_index=self._sample_index[rows],
            num_logprobs=self._num_logprobs[rows],
        )

    def distribution(self, raw: Floats, row: int, position: int) -> tuple[I64, F64]:
        """Return the ids (ascending) that a row may choose from its logits [vocab], and their probabilities [n]."""
        logits = self._processed(raw, row, position)
        temperature = float(self._temperature[row])
        if temperature < GREEDY_BELOW:
            return np.array([np.argmax(logits)]), np.ones(1)
        scaled = logits / logits.dtype.type(temperature)
        ids = _candidates(scaled, int(self._top_k[row]), float(self._top_p[row]), float(self._min_p[row]))
        ids = np.flatnonzero(scaled > -np.inf) if ids is None else ids
        weights = np.exp(scaled[ids].astype(np.float64) - float(scaled.max()))
        return ids, weights / weights.sum()

    def noise_key(self, row: int) -> tuple[int, int]:
        """Return the row's seed and sample index."""
        return int(self._seed[row]), int(self._sample_index[row])

    def _choose(self, raw: Floats, row: int, position: int, top: int) -> int:
        logits = self._processed(raw, row, position)
        temperature = float(self._temperature[row])
        if temperature < GREEDY_BELOW:
            return top if logits is raw else int(np.argmax(logits))
        scaled = logits / logits.dtype.type(temperature)
        ids = _candidates(scaled, int(self._top_k[row]), float(self._top_p[row]), float(self._min_p[row]))
        return _gumbel_argmax(scaled, ids, int(self._seed[row]), position, int(self._sample_index[row]))

    def _processed(self, raw: Floats, row: int, position: int) -> Floats:
        """Return the row's logits after bias, mask and penalties; `raw` itself if nothing applies."""
        rules = self._rules[row]
        masked = position < self._masked_before[row]
        barrier = self._barrier(row, position) if self._has_grammar[row] and self._barrier is not None else None
        if not (masked or len(rules.bias_ids) or self._penalized[row] or barrier is not None):
            return raw
        logits = raw.copy()
        logits[rules.bias_ids] += rules.bias
        if barrier is not None:
            logits += _raised(barrier, rules.masked_ids) if masked else barrier
        elif masked:
            logits[rules.masked_ids] = -np.inf
        if self._penalized[row]:
            repetition = logits.dtype.type(self._repetition[row])
            if repetition != 1:
                seen = np.flatnonzero(self._counts.seen(row))
                values = logits[seen]
                logits[seen] = np.where(values > 0, values / repetition, values * repetition)
            counts = self._counts.outputs(row)
            used = np.flatnonzero(counts)
            logits[used] -= self._frequency[row] * counts[used] + self._presence[row]
        return logits

    def _with_logprobs(self, host: Floats, rows: I32, tokens: I32) -> SampleOutput:
        wanted = self._num_logprobs[rows]
        width = int(wanted.max())
        logprobs = np.full(len(rows), np.nan, np.float32)
        top_tokens = np.full((len(rows), width), -1, np.int32)
        top_logprobs = np.full((len(rows), width), np.nan, np.float32)
        for i in np.flatnonzero(wanted >= 0).tolist():
            raw = host[i].astype(np.float64)
            top = raw.max()
            log_total = top + np.log(np.exp(raw - top).sum())
            logprobs[i] = raw[tokens[i]] - log_total
            best = _largest(raw, int(wanted[i]))
            order = best[np.argsort(-raw[best], kind="stable")]
            top_tokens[i, : len(order)] = order
            top_logprobs[i, : len(order)] = raw[order] - log_total
        return SampleOutput(tokens, logprobs, top_tokens if width else None, top_logprobs if width else None)


def _raised(barrier: F32, masked_ids: I64) -> F32:
    """Return a grammar's barrier with the masked ids behind it too; of a grammar that lets nothing else, its own."""
    raised = barrier.copy()
    raised[masked_ids] = -np.inf
    return raised if np.isfinite(raised).any() else barrier


def _on_host(logits: torch.Tensor) -> Floats:
    return np.asarray(logits.detach().cpu().numpy())


def _largest(values: Floats, count: int) -> I64:
    """Return the ascending indices of the `count` largest values; equal values: lowest index first."""
    if count <= 0:
        return np.zeros(0, np.int64)
    if count >= len(values):
        return np.arange(len(values))
    border = np.partition(values, len(values) - count)[len(values) - count]
    keep = values > border
    ties = np.flatnonzero(values == border)
    keep[ties[: count - int(keep.sum())]] = True
    return np.flatnonzero(keep)


def _candidates(scaled: Floats, top_k: int, top_p: float, min_p: float) -> I64 | None:
    """Return the ascending ids that min-p, top-k and top-p leave of one row of scaled logits [vocab]; None: all."""
    if min_p <= 0 and top_k <= 0 and top_p >= 1:
        return None
    top = float(scaled.max())
    ids = np.flatnonzero(scaled >= top + np.log(min_p)) if min_p > 0 else np.flatnonzero(scaled > -np.inf)
    if 0 < top_k < len(ids):
        ids = ids[_largest(scaled[ids], top_k)]
    if top_p < 1:
        ids = ids[_nucleus(scaled[ids].astype(np.float64) - top, top_p)]
    return ids


def _nucleus(gaps: F64, top_p: float) -> I64:
    """Return the ascending indices of the smallest set with mass >= `top_p`; `gaps` [n] <= 0 are below the top."""
    weights = np.exp(gaps)
    goal = top_p * weights.sum()
    for reach in (_NUCLEUS, np.inf):
        near = np.flatnonzero(gaps >= -reach)
        order = near[np.argsort(-gaps[near], kind="stable")]
        mass = np.cumsum(weights[order])
        if mass[-1] >= goal:
            break
    count = int(np.searchsorted(mass, goal, side="left")) + 1
    return np.sort(order[:count])


def _gumbel_argmax(scaled: Floats, ids: I64 | None, seed: int, position: int, sample: int) -> int:
    """Return argmax of scaled logit + noise over `ids` (None: all), ties to the lowest id.

    Noise is bounded by GUMBEL_MAX: once some id has a perturbed value, ids further below it than that cannot win and
    their noise is not computed. The result equals the full evaluation exactly.
    """
    values = scaled if ids is None else scaled[ids]
    if len(values) > _WHOLE:
        near = np.flatnonzero(values >= values.max() - values.dtype.type(_NEAR))
        names = near if ids is None else ids[near]
        best = (values[near].astype(np.float64) + gumbel(names, seed, position, sample)).max()
        # The margin covers rounding of the bound to the logits' type.
        can_win = np.flatnonzero(values >= values.dtype.type(best - GUMBEL_MAX - 1e-3))
        ids, values = can_win if ids is None else ids[can_win], values[can_win]
    elif ids is None:
        ids = np.arange(len(values))
    return int(ids[np.argmax(values.astype(np.float64) + gumbel(ids, seed, position, sample))])
