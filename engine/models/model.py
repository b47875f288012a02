"""What every model is to the engine: facts, the KV it keeps, and one typed forward. No model's name appears above here."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from core.kv import KVLayout
from engine.batch import ForwardBatch
from engine.cache.hit import PAGES, ReuseRule
from engine.images import ImageFacts


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the scheduler, the namespace and the registration need to know of a model."""

    name: str
    """Name that clients use by default."""
    revision: str
    """Digest of config and weights: hex."""
    tokenizer_digest: str
    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    kv_dtype: str
    mode: str = "exact"
    history_tokens: int = 0
    """Ids before a row's first query token that forward reads (`ForwardBatch.history`)."""
    reuse: ReuseRule = PAGES
    """What cached prefixes are good for, and which rows of a prompt run through every layer. Lengths that change what
    pages or tokens come out belong into `mode` too, so that workers that differ in them do not exchange KV."""
    images: ImageFacts | None = None
    """None: the model takes no images. Otherwise it is an `ImageModel`."""


class KVTensors(Protocol):
    """The KV memory of one engine, as tensors over the registered regions (`engine.cache.kv_memory`)."""

    layout: KVLayout

    def paged(self, component: str) -> torch.Tensor:
        """Return [num_pages, *record_shape] of a paged component, in its element type."""
        ...

    def per_row(self, component: str) -> torch.Tensor:
        """Return [num_rows, *record_shape] of a ring or state component."""
        ...


class Model(Protocol):
    """A loaded model. Weights are immutable; all sequence state is in `KVTensors`."""

    facts: ModelFacts
    device: torch.device
    """Where its weights lie, and the tensors that `forward` takes and returns."""

    def kv_layout(self, num_pages: int, num_rows: int, page_tokens: int) -> KVLayout:
        """Return the components this model keeps, one region per component (region index = component index)."""
        ...

    def forward(self, batch: ForwardBatch, kv: KVTensors) -> torch.Tensor:
        """Write KV of all query tokens, return logits [m, vocab] (float32 or float64) for `batch.sample_at`."""
        ...


@runtime_checkable
class GraphModel(Model, Protocol):
    """A model whose forward can be captured once and replayed over other contents of the same tensors."""

    def graph_ready(self, batch: ForwardBatch) -> bool:
        """Return whether the forward of batches of this shape never waits for the device and reads no host array."""
        ...


class ImageEncoder(Protocol):
    """Turns pixels into what stands for them in the model. Used by the executor thread only, in inference mode."""

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return [t, hidden] for the t positions of an image's place; `pixels` uint8 RGB [h, w, 3] of a planned size.

        Depends on the pixels only: the same ones give the same bits.
        """
        ...


@runtime_checkable
class ImageModel(Model, Protocol):
    """A model that takes images: `forward` reads `ForwardBatch.images`."""

    @property
    def image_encoder(self) -> ImageEncoder | None:
        """The encoder; None if this checkpoint has none."""
        ...
