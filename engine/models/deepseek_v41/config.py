"""What config.json of a DeepSeek-V4 or V4.1 checkpoint says, checked and put into our own words. Knows no tensors."""

import msgspec

from engine.models.deepseek_v41.layer_map import LayerPlan, decoder_start


class YarnScaling(msgspec.Struct, frozen=True, kw_only=True):
    """How the long rope base is stretched; only layers with a global part use it."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_positions: int


class IndexConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How entries are selected."""

    num_heads: int
    head_dim: int
    top_k: int
    hadamard: bool
    """Queries and keys are rotated before they are quantized (V4)."""
    own_compressor: bool
    """Keys are compressed from the layer's input (V4), not projected from the entry's latent (V4.1)."""


class CandidateConfig(msgspec.Struct, frozen=True, kw_only=True):
    """First level of the two-level selection."""

    source: int
    top_blocks: int
    block_size: int
    """Entries per block."""


class MhcConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Residual streams."""

    mult: int
    sinkhorn_iters: int
    eps: float
    pre_from_prev: bool
    """Inputs are collapsed with the coefficients of the previous sublayer (V4.1), not of the same one (V4)."""


class MoeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Experts of a backbone layer; DSpark overrides their number and the number chosen."""

    num_experts: int
    num_shared: int
    top_k: int
    inner_size: int
    route_scale: float
    norm_top_k: bool
    weight_eps: float
    """Added to the sum of the chosen scores before dividing by it."""
    swiglu_limit: float
    gate_temp: float
    num_hash_layers: int
    image_bias: bool
    """Image rows have a selection bias of their own."""


class EngramConfig(msgspec.Struct, frozen=True, kw_only=True):
    """N-gram tables; one per layer in `layers`."""

    layers: tuple[int, ...]
    num_rows: tuple[int, ...]
    """Per table, in the order of `layers`."""
    max_ngram: int
    vocab_size: int
    """Primes of the hash start from here."""
    num_heads: int
    head_dim: int
    pad_token_id: int
    """As a token id of the tokenizer, not of the compressed vocabulary."""
    compressed_vocab_size: int

    @property
    def num_columns(self) -> int:
        """Rows that one token looks up in one table."""
        return (self.max_ngram - 1) * self.num_heads


class DsparkConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The draft model."""

    num_stages: int
    block_size: int
    """Tokens drafted per step."""
    noise_token_id: int
    target_layers: tuple[int, ...]
    markov_rank: int
    num_experts: int
    top_k: int


class VisionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The image encoder and the budget of one image."""

    num_layers: int
    hidden_size: int
    num_heads: int
    inner_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    """Patches per side of the square that becomes one image token."""
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None
    norm_eps: float


class QuantConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Number formats of the checkpoint and of the caches."""

    block: tuple[int, int]
    """Rows and columns of a dense weight that share a scale."""
    activation_group: int
    """Values along the last dimension that share a scale when they enter a quantized linear."""
    expert_dtype: str
    """fp4 | fp8: routed experts."""
    fp4_sparse_kv: bool
    """Compressed entries are q4kv(16) (V4.1); otherwise q8(32)."""


class V41Config(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and rules of one model of the family."""

    architecture: str
    is_v4: bool
    """V4's forms: per-head query norm, classic streams, compressors with position bias, 584-byte rows."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    rope_dim: int
    """Rotary dimensions, the last ones of a head."""
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    window: int
    norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: YarnScaling | None
    max_positions: int
    q_head_norm: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    image_token_id: int | None
    layers: tuple[LayerPlan, ...]
    stages: tuple[LayerPlan, ...]
    """Draft stages, numbered behind the backbone."""
    index: IndexConfig
    candidates: CandidateConfig | None
    mhc: MhcConfig
    moe: MoeConfig
    engram: EngramConfig | None
    dspark: DsparkConfig | None
    num_mtp_layers: int
    """V4's next-token layers, which are recognised in a checkpoint and not run."""
    vision: VisionConfig | None
    quant: QuantConfig

    @property
    def decoder_start(self) -> int:
        """First layer that writes nothing global; `num_layers` if every layer may (V4)."""
        return decoder_start(self.layers)

    @property
    def kv_owners(self) -> tuple[LayerPlan, ...]:
        """Layers that write compressed entries, in order."""
        return tuple(layer for layer in self.layers if layer.owns_kv)
