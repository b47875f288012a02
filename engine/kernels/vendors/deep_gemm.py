# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""DeepGEMM: bfloat16 products with float32 results. Its FP8 and FP4 products read other scales and layouts than ours."""

import deep_gemm
import torch


def plain_linear(x: torch.Tensor, weight: torch.Tensor, *, fixed: bool = False) -> torch.Tensor:
    """Return what `engine.kernels.plain_linear` does; its tiles follow the number of rows, so `fixed` is refused."""
    assert not fixed
    made = torch.empty(len(x), len(weight), dtype=torch.float32, device=x.device)
    if len(x):
        deep_gemm.bf16_gemm_nt(x, weight, made)
    return made
