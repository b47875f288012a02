"""The vendors' kernel packages as their interfaces are documented, in torch: what adapters are tested against.

Where a vendor promises nothing, the fake does what hurts: another one of equal scores, padded rows, strict dtypes.
"""

from types import ModuleType, SimpleNamespace

import torch


def bf16_gemm_nt(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> None:
    """DeepGEMM: d = a b^T."""
    assert a.dtype == b.dtype == torch.bfloat16
    assert d.dtype in (torch.bfloat16, torch.float32)
    d.copy_(a.float() @ b.float().T)


def topk(x: torch.Tensor, k: int, *, indices_type: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSelect: the best k in no order; of equal ones the highest columns; NaN aborts."""
    assert x.dtype == torch.float32
    assert x.stride(0) * x.element_size() % get_stride_requirement()[0] == 0
    assert not x.isnan().any()
    values, indices = x.flip(1).sort(dim=1, descending=True, stable=True)
    return values[:, :k], (x.shape[1] - 1 - indices[:, :k]).to(indices_type)


def get_stride_requirement() -> tuple[int, int]:
    """DeepSelect: bytes that rows of inputs and outputs are a multiple of apart."""
    return 1024, 32


def per_token_cast(
    x: torch.Tensor, fmt: str, num_per_channels: int, *, round_sf: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """TileKernels: codes, and float32 scales."""
    assert (fmt, round_sf) == ("e4m3", True)
    groups = x.float().unflatten(1, (-1, num_per_channels))
    bits = (groups.abs().amax(-1).clamp(min=1e-4) / 448).view(torch.int32)
    scales = ((((bits - 1) >> 23) + 1) << 23).view(torch.float32)
    return (groups / scales[..., None]).flatten(1).to(torch.float8_e4m3fn), scales


def flash_mla_sparse_fwd(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, *, d_v: int, attn_sink: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FlashMLA: attention of each row over the keys it names; -1 names none."""
    assert q.dtype == kv.dtype == torch.bfloat16
    assert d_v == 512
    assert indices.dtype == torch.int32
    at = indices[:, 0]
    keys = kv[:, 0][at.clamp(min=0).long()].float()
    scores = torch.einsum("thd,tkd->thk", q.float(), keys) * sm_scale
    scores = scores.masked_fill((at < 0)[:, None], -torch.inf)
    whole = torch.cat((scores, attn_sink[None, :, None].expand(len(q), -1, 1)), 2)
    made = torch.einsum("thk,tkd->thd", whole.softmax(2)[..., :-1], keys)
    return made.bfloat16(), scores.amax(2), scores.logsumexp(2)


def modules() -> dict[str, ModuleType]:
    """Return the packages by the names they are imported by."""
    have = {
        "deep_gemm": {"bf16_gemm_nt": bf16_gemm_nt},
        "deep_select": {"topk": topk, "get_stride_requirement": get_stride_requirement},
        "tile_kernels": {"quant": SimpleNamespace(per_token_cast=per_token_cast)},
        "flash_mla": {"flash_mla_sparse_fwd": flash_mla_sparse_fwd},
    }
    made = {name: ModuleType(name) for name in have}
    for name, functions in have.items():
        vars(made[name]).update(functions)
    return made
