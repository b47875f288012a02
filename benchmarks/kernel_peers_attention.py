"""Public kernels that do the work of paged attention, over keys that lie densely: no page table is followed."""

from collections.abc import Callable

import torch
from torch.nn import functional
from torch.nn.attention import bias
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.kernel_case import Inputs
from benchmarks.kernel_timing import sets_for, time_us

Size = dict[str, int]
FLEX = ((8, 8192), (32, 32768), (256, 4096), (1, 8192))


def _dense(size: Size) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return queries [b, h, q, d], keys and values [b, k, n, d], as many sets as keep the cache cold."""
    if size.get("by_token") or size.get("bits", 16) != 16 or (size.get("q", 1) > 1 and size["b"] > 1):
        raise ValueError("no equal work at this size")
    b, n, q = size["b"], size["n"], size.get("q", 1)

    def one() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shapes = ((b, size["h"], q, size["d"]), *(2 * ((b, size["k"], n, size["d"]),)))
        query, key, value = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
        return query, key, value

    return [one() for _ in range(sets_for(4 * b * n * size["k"] * size["d"]))]


def _timed(size: Size, call: Callable[..., torch.Tensor]) -> float:
    return time_us([lambda s=s: call(*s) for s in _dense(size)])[0]


def sdpa(_: list[Inputs], size: Size) -> float:
    """`scaled_dot_product_attention`, with the kernel that torch chooses."""
    n, q = size["n"], size.get("q", 1)
    mask = bias.causal_lower_right(q, n) if 1 < q < n else None
    causal = q > 1 and q == n
    return _timed(
        size,
        lambda query, key, value: functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=True
        ),
    )


def flex(_: list[Inputs], size: Size) -> float:
    """FlexAttention, compiled, at the sizes that are worth compiling for."""
    n, q = size["n"], size.get("q", 1)
    if (size["b"], n) not in FLEX or size.get("page", 64) != 64:
        raise ValueError("not compiled for this size")
    mask = None
    if q > 1:
        mask = create_block_mask(lambda _b, _h, at, key: key <= at + (n - q), None, None, q, n, device="cuda")
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    return _timed(size, lambda query, key, value: compiled(query, key, value, block_mask=mask, enable_gqa=True))


PEERS_ATTENTION = {"paged_attention": {"torch_sdpa_dense_us": sdpa, "torch_flex_dense_us": flex}}
