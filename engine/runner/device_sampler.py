"""Token choice on a device without waiting for it: parameters go up, tokens and log-probabilities stay there.

The rules that need more than parameters (bias, masks, penalties, grammars) are the host's (`Sampler.on_host`). Chooses
what `engine.sampling` chooses for the same logits: border, noise and sums are in float64. Executor thread only.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels.ops import pick
from engine.kernels.reference.token_borders import token_borders
from engine.kernels.reference.token_logprobs import token_logprobs
from engine.runner.device_stream import DeviceStream
from engine.sampling import GREEDY_BELOW, ChoiceParams

I64 = npt.NDArray[np.int64]

_BUFFERS = 3
_FIELDS = 9
"""Values a row and step."""


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """What was chosen for m rows, on the device."""

    tokens: torch.Tensor  # int64 [m]
    logprobs: torch.Tensor | None = None  # float32 [n, 1 + K] of the rows that asked: the chosen token's, then the best
    top_tokens: torch.Tensor | None = None  # int64 [n, K], most likely first


class DeviceSampler:
    """For up to `num_rows` rows a step."""

    def __init__(self, num_rows: int, vocab_size: int, stream: DeviceStream, ahead: int = 0) -> None:
        """`ahead`: choices beyond three that may be queued before the first has happened."""
        device = stream.device
        self._vocab_size = vocab_size
        self._sample = pick("sample_tokens", device)
        self._borders = pick("token_borders", device)
        self._logprobs = pick("token_logprobs", device)
        self._zero = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._no_temperature = torch.zeros(num_rows, dtype=torch.float64, device=device)
        self._no_border = torch.full((num_rows,), -torch.inf, dtype=torch.float64, device=device)
        self._no_last = torch.full((num_rows,), vocab_size, dtype=torch.int64, device=device)
        self._values = torch.zeros(_FIELDS, num_rows, dtype=torch.int64, device=device)
        self._uploads = [stream.pinned(_FIELDS * num_rows, torch.int64) for _ in range(_BUFFERS + ahead)]
        self._turn = 0

    def choose(self, logits: torch.Tensor, params: ChoiceParams, positions: I64) -> DeviceChoice:
        """Return what rows choose of `logits` [m, vocab], float32 or float64; `positions` [m] as in `Sampler.sample`."""
        m = len(positions)
        wanting = np.flatnonzero(params.num_logprobs >= 0)
        restricted = np.flatnonzero(params.restricted)
        plain = (params.temperature < GREEDY_BELOW).all()
        if plain and not len(wanting):
            zero = self._zero[:m]
            none = (self._no_temperature[:m], zero, zero, zero, self._no_border[:m], self._no_last[:m])
            return DeviceChoice(self._sample(logits, *none))
        fields = self._upload(params, positions, restricted, wanting)
        temperature, seed, position, sample, log_min_p, top_k, top_p = (fields[i, :m] for i in range(7))
        temperature = temperature.view(torch.float64)
        border, last = self._no_border[:m], self._no_last[:m]
        if len(restricted):
            at = fields[7, : len(restricted)]
            limits = (log_min_p.view(torch.float64)[at], top_k[at], top_p.view(torch.float64)[at])
            borders = self._borders if logits.dtype is torch.float32 else token_borders
            found = borders(logits, at, temperature[at], *limits)
            border, last = border.index_copy(0, at, found[0]), last.index_copy(0, at, found[1])
        tokens = self._sample(logits, temperature, seed, position, sample, border, last)
        if not len(wanting):
            return DeviceChoice(tokens)
        at = fields[8, : len(wanting)]
        logprobs = self._logprobs if logits.dtype is torch.float32 else token_logprobs
        return DeviceChoice(tokens, *logprobs(logits, at, tokens[at], int(params.num_logprobs.max())))

    def tokens(self, logits: torch.Tensor, params: ChoiceParams, positions: I64) -> torch.Tensor:
        """Return int64 [m] on the device what rows choose that ask for no log-probabilities."""
        return self.choose(logits, params, positions).tokens

    def _upload(
        self, params: ChoiceParams, positions: I64, restricted: npt.NDArray[np.intp], wanting: npt.NDArray[np.intp]
    ) -> torch.Tensor:
        upload = self._uploads[self._turn % len(self._uploads)].view(_FIELDS, -1)
        self._turn += 1
        host, m = upload.numpy(), len(positions)
        with np.errstate(divide="ignore"):
            log_min_p = np.log(params.min_p)
        fields = (
            params.temperature.view(np.int64),
            params.seed.view(np.int64),
            positions,
            params.sample_index,
            log_min_p.view(np.int64),
            params.top_k,
            params.top_p.view(np.int64),
        )
        for i, values in enumerate(fields):
            host[i, :m] = values
        host[7, : len(restricted)] = restricted
        host[8, : len(wanting)] = wanting
        self._values.copy_(upload, non_blocking=True)
        return self._values
