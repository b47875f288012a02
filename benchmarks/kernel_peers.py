"""Public kernels that do equal work, for the ops that have them. A peer gets random inputs in its own format, untimed.

What a peer reads or leaves out is said in its name: FP8 weights and keys where ours are four bits, no SwiGLU, no merge of
formats. Packages that are not installed raise, and the row says so.
"""

import importlib
from collections.abc import Callable

import torch

from benchmarks.kernel_case import Inputs
from benchmarks.kernel_peers_attention import PEERS_ATTENTION
from benchmarks.kernel_timing import sets_for, time_us

Size = dict[str, int]
Peer = Callable[[list[Inputs], Size], float]
"""Returns microseconds for the inputs of a case at a size."""


def peer(run: Callable[[], object]) -> object:
    """Return a peer's microseconds, or why it did not run."""
    try:
        return run()
    except Exception as error:  # noqa: BLE001 - a peer that fails is a row, not the end
        torch.cuda.synchronize()
        return f"did not run: {type(error).__name__}: {str(error)[:200]}"


def _rotating(make: Callable[[], Callable[[], object]], num_bytes: int) -> float:
    """Time calls over as many input sets as keep the cache cold."""
    return time_us([make() for _ in range(sets_for(num_bytes))])[0]


def torch_topk(inputs: list[Inputs], size: Size) -> float:
    """`torch.topk`, sorted by column afterwards, without the rule for ties."""

    def call(scores: torch.Tensor) -> object:
        if size.get("block", 1) > 1:
            scores = scores.unflatten(1, (-1, size["block"])).amax(2)
        return scores.topk(size["k"], dim=1, sorted=False).indices.sort(1).values

    return time_us([lambda i=i: call(i.args[0]) for i in inputs])[0]


def _fp8(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(torch.float8_e4m3fn)


def deep_gemm_logits(_: list[Inputs], size: Size) -> float:
    """Paged index logits over FP8 keys (132 bytes each) in pages of 64."""
    deep_gemm = importlib.import_module("deep_gemm")

    if "shared" in size or "uneven" in size:
        raise ValueError("no equal work at this size")
    b, rows, n, page = size["b"], size["rows"], size["n"], 64

    def make() -> Callable[[], object]:
        count = b * n // page
        cache = torch.zeros(count, page, 1, 132, dtype=torch.uint8, device="cuda")
        flat = cache.view(count, -1)
        flat[:, : page * 128] = _fp8(count, page * 128).view(torch.uint8)
        flat[:, page * 128 :] = torch.ones(count, page, device="cuda").view(torch.uint8)
        query, weight = _fp8(b, rows, 32, 128), torch.rand(b * rows, 32, device="cuda")
        lengths = torch.full((b, rows), n, device="cuda", dtype=torch.int32)
        table = torch.arange(count, device="cuda", dtype=torch.int32).view(b, -1)
        plan = deep_gemm.get_paged_mqa_logits_metadata(lengths, page, deep_gemm.get_num_sms())
        try:
            deep_gemm.fp8_fp4_paged_mqa_logits((query, None), cache, weight, lengths, table, plan, n)
        except Exception:  # noqa: BLE001 - the other calling convention of this package's versions
            return lambda: deep_gemm.fp8_fp4_paged_mqa_logits(query, cache, weight, lengths, table, plan, n)
        return lambda: deep_gemm.fp8_fp4_paged_mqa_logits((query, None), cache, weight, lengths, table, plan, n)

    return _rotating(make, b * n * 132)


def flash_mla_v4(_: list[Inputs], size: Size) -> float:
    """Sparse decoding over V4 rows of 584 bytes, as many keys and heads."""
    flash_mla = importlib.import_module("flash_mla")

    rows, block = size["b"] * size["rows"], 64
    num_blocks = max(64, size["b"] * (size["n"] + 128) // block)
    raw = torch.zeros(num_blocks, block * 584, dtype=torch.uint8, device="cuda")
    body = raw[:, : block * 576].view(num_blocks, block, 576)
    body[..., :448] = _fp8(num_blocks, block, 448).view(torch.uint8)
    body[..., 448:] = torch.randn(num_blocks, block, 64, device="cuda").bfloat16().view(torch.uint8)
    raw[:, block * 576 :] = 127
    pitch = (block * 584 + 575) // 576 * 576
    padded = torch.zeros(num_blocks, pitch, dtype=torch.uint8, device="cuda")
    padded[:, : block * 584] = raw
    cache = padded.view(torch.float8_e4m3fn).as_strided((num_blocks, block, 1, 584), (pitch, 584, 584, 1))
    keys = size["k"] + 128

    def make() -> Callable[[], object]:
        query = torch.randn(size["b"], size["rows"], 64, 512, device="cuda").bfloat16()
        chosen = torch.randint(0, num_blocks * block, (size["b"], size["rows"], keys), device="cuda", dtype=torch.int32)
        plan = flash_mla.get_mla_metadata()
        plan = plan[0] if isinstance(plan, tuple) else plan
        return lambda: flash_mla.flash_mla_with_kvcache(
            query, cache, None, None, 512, plan, softmax_scale=512**-0.5, indices=chosen, use_legacy=True
        )

    return time_us([make() for _ in range(min(4, sets_for(rows * keys * 584)))])[0]


def _rows_each(inputs: list[Inputs]) -> torch.Tensor:
    """Return int32 [experts]: the rows of every expert in a call of `experts_up` or `experts_down`."""
    offsets = inputs[0].args[3]
    assert isinstance(offsets, torch.Tensor)
    return offsets.diff().int()


def deep_gemm_masked(out: int, inner: int) -> Peer:
    """Grouped product of FP8 weights (twice the bytes), of as many rows an expert, without what follows it."""

    def run(inputs: list[Inputs], size: Size) -> float:
        deep_gemm = importlib.import_module("deep_gemm")

        experts, mean, counts = size["e"], size["t"] * size["k"] // size["e"], _rows_each(inputs)
        most = max(64, int(counts.max()))

        def make() -> Callable[[], object]:
            weight = _fp8(experts, out, inner)
            scale = torch.rand(experts, out // 128, inner // 128, device="cuda") + 0.5
            x, xs = _fp8(experts, most, inner), torch.rand(experts, most, inner // 128, device="cuda") + 0.5
            made = torch.empty(experts, most, out, device="cuda", dtype=torch.bfloat16)
            return lambda: deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked(
                (x, xs), (weight, scale), made, counts, mean, disable_ue8m0_cast=True
            )

        return _rotating(make, experts * out * inner)

    return run


def torch_grouped(out: int, inner: int) -> Peer:
    """Grouped product of bfloat16 weights (four times the bytes), of as many rows an expert, without what follows it."""

    def run(inputs: list[Inputs], size: Size) -> float:
        ends = _rows_each(inputs).cumsum(0, dtype=torch.int32)
        weight = torch.randn(size["e"], out, inner, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        x = torch.randn(int(ends[-1]), inner, device="cuda", dtype=torch.bfloat16)
        return time_us([lambda: torch.nn.functional.grouped_mm(x, weight, offs=ends)])[0]

    return run


def cublas_bf16(out_dtype: torch.dtype) -> Peer:
    """The same product with bfloat16 weights (twice the bytes of e4m3), without formats."""

    def run(_: list[Inputs], size: Size) -> float:
        groups = size.get("g", 1)

        def make() -> Callable[[], object]:
            x = torch.randn(groups, size["t"], size["k"], device="cuda").bfloat16()
            weight = torch.randn(groups, size["n"], size["k"], device="cuda").bfloat16()
            if groups > 1:
                return lambda: torch.bmm(x, weight.mT)
            if out_dtype is torch.float32:
                return lambda: torch.mm(x[0], weight[0].T, out_dtype=out_dtype)
            return lambda: torch.mm(x[0], weight[0].T)

        return _rotating(make, 2 * groups * size["k"] * (size["n"] + size["t"]))

    return run


PEERS: dict[str, dict[str, Peer]] = {
    **PEERS_ATTENTION,
    "dense_linear": {"cublas_bf16_us": cublas_bf16(torch.bfloat16)},
    "plain_linear": {"cublas_bf16_us": cublas_bf16(torch.float32)},
    "select_top": {"torch_topk_sort_us": torch_topk},
    "index_scores": {"deep_gemm_fp8_keys_us": deep_gemm_logits},
    "sparse_attention": {"flash_mla_v4_rows_us": flash_mla_v4},
    "experts_up": {"deep_gemm_fp8_us": deep_gemm_masked(4608, 5120), "torch_grouped_bf16_us": torch_grouped(4608, 5120)},
    "experts_down": {"deep_gemm_fp8_us": deep_gemm_masked(5120, 2304), "torch_grouped_bf16_us": torch_grouped(5120, 2304)},
}  # fmt: skip
