"""What the model on host memory and the one on a device have in common: facts, where KV lies, which rows run where."""

import torch

from core.kv import KVLayout
from engine.models.deepseek_v41.caches import CacheMap
from engine.models.deepseek_v41.config import V41Config
from engine.models.deepseek_v41.step import DecoderReplay, check_replay
from engine.models.model import ImageEncoder, ModelFacts


class PackedModel:
    """A model over the records of `caches`, byte for byte the same on both."""

    def __init__(
        self,
        config: V41Config,
        facts: ModelFacts,
        device: torch.device,
        elem: str,
        *,
        replay: DecoderReplay | None,
        image_encoder: ImageEncoder | None,
    ) -> None:
        """`elem` is the type of pending rows. Raises `ConfigError` if the model cannot replay so."""
        self.facts = facts
        self.device = device
        self.image_encoder = image_encoder
        self.config = config
        self.replay = replay or DecoderReplay()
        check_replay(self.replay, config, 1 + (config.dspark.block_size if config.dspark else 0))
        self._elem = elem
        self._maps: dict[int, CacheMap] = {}
        self.executed_rows = [0] * config.num_layers
        """Per layer, rows that ran through its attention and feed-forward so far; captured steps count once."""

    def kv_layout(self, num_pages: int, num_rows: int, page_tokens: int) -> KVLayout:
        """Return the components of `caches`; raises `ConfigError` if a page would split a group of tokens."""
        return self.cache_map(page_tokens).layout(num_pages, num_rows)

    def cache_map(self, page_tokens: int) -> CacheMap:
        """Return where everything lies."""
        found = self._maps.get(page_tokens)
        if found is None:
            found = self._maps[page_tokens] = CacheMap(self.config, page_tokens, self._elem)
        return found
