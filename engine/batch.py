"""The tensors of one step, passed explicitly to every layer. Built by the runner, read by models and attention."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RowReplay:
    """What replay prescribes for the rows of a step; [b] each. Models without replay never read it."""

    encoder_floor: I32
    """Window rows below this position do not exist for the row (0: all exist)."""
    known_tokens: I32
    """Tokens known of the request when it was admitted, from whose end the decoder's keep length counts; 0 means that
    the row runs whole, whatever the model's keep length."""
    write_from: I32
    """Tokens below this position write nothing paged: their pages exist already and may be shared."""


@dataclass(frozen=True, slots=True)
class ImageRows:
    """What n of a step's t query tokens are replaced by: they are positions of images."""

    at: torch.Tensor  # int64 [n] indices into t, each once
    rows: torch.Tensor  # [n, hidden] in the place of embeddings


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """The rows of a step for kernels: tensors on the device, and bounds that the host knows.

    In a captured step the batch is padded: a padding row has no query tokens (`q_start` repeats its end), a padding token
    has id 0, position 0 and slot -1, which stores nothing. What comes out for padding means nothing.
    """

    rows: torch.Tensor  # int32 [b] engine rows
    q_start: torch.Tensor  # int32 [b+1]
    seq_start: torch.Tensor  # int32 [b] tokens in KV before this step
    max_q: int
    """No row has more query tokens."""
    max_length: int
    """No row has more tokens in KV after this step."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """b rows, t query tokens. Host arrays are for control flow, tensors for arithmetic; row order is equal in all.

    With `device_rows` every tensor is on the model's device, `page_table` is int32 and may be wider than this step needs
    (what is in columns past a row's pages is not defined), and a forward that may be captured reads no host array.
    """

    token_ids: torch.Tensor  # int64 [t]
    positions: torch.Tensor  # int64 [t] absolute positions
    slots: torch.Tensor  # int64 [t] page * page_tokens + offset where each token's KV is written
    page_table: torch.Tensor  # int64 [b, max_pages_of_this_step]; columns past a row's pages are 0 (SINK)
    rows: I32  # [b] engine rows: index of ring and state records
    q_start: I32  # [b+1]
    seq_start: I32  # [b] tokens in KV before this step
    sample_at: torch.Tensor  # int64 [m] indices into t whose logits are wanted, ascending
    page_tokens: int
    deterministic: bool
    """A14: linears in padded row tiles of 16, attention row by row in page order."""
    history: torch.Tensor | None = None
    """int64 [b, h]: the h tokens before each row's `seq_start`, oldest first, -1 before position 0; h is the model's
    `history_tokens`. None for models that need none."""
    replay: RowReplay | None = None
    """None: no row has floors, everything is written, every row runs whole."""
    images: ImageRows | None = None
    """None: the step computes no position of an image."""
    device_rows: DeviceRows | None = None
    """None: the step runs on host memory."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.rows)

    def on(self, device: torch.device) -> "ForwardBatch":
        """Return the batch with its tensors on a device; waits for the copies."""
        lengths = np.diff(self.q_start)
        images = self.images
        return replace(
            self,
            token_ids=self.token_ids.to(device),
            positions=self.positions.to(device),
            slots=self.slots.to(device),
            page_table=self.page_table.to(device, torch.int32),
            sample_at=self.sample_at.to(device),
            history=None if self.history is None else self.history.to(device),
            images=None if images is None else ImageRows(images.at.to(device), images.rows.to(device)),
            device_rows=DeviceRows(
                rows=torch.tensor(self.rows, dtype=torch.int32, device=device),
                q_start=torch.tensor(self.q_start, dtype=torch.int32, device=device),
                seq_start=torch.tensor(self.seq_start, dtype=torch.int32, device=device),
                max_q=int(lengths.max(initial=0)),
                max_length=int((self.seq_start + lengths).max(initial=0)),
            ),
        )
