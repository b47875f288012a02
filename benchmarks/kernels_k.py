"""The kernels K1 .. K5 of the design's suite at the sizes of a V4.1 server, and references under `torch.compile`.

``python -m benchmarks.kernels_k --out FILE [--seconds 170] [K1 K2 K3 K4 K5 compiled]``: trials of `benchmarks.kernel_trials`,
what matters most first; what no longer fits into the time is named in the record. `--list` prints them and needs no GPU.
"""

import itertools
import json
import sys
from collections.abc import Callable, Iterator

from benchmarks.kernel_cases import CASES
from benchmarks.kernel_trials import Trial, run_trials, trials_parser
from engine.models.deepseek_v41.device.attention import splits_of

Size = dict[str, int]
Sized = Iterator[tuple[str, Size]]
_SCORE_BYTES = 1 << 30
"""Of one piece of a prompt's index scan, as `Selections` cuts it."""
_MOST_CHECKED = {
    "sparse_attention": {"b": 8, "rows": 512},
    "index_scores": {"b": 8},
    "select_top": {"t": 64},
    "block_scores": {"t": 8},
}
"""References of more would take gigabytes; a row's bits do not depend on the others."""
COMPILED_AT = {"index_scores": 0, "sparse_attention": 0, "engram_lookup": 1, "sample_tokens": 4}
"""Which of a case's large sizes is compared with the compiled reference, where that is not the last."""
COMPILED = (
    "store_window", "stream_coefficients", "store_kv", "sample_tokens", "index_scores", "sparse_attention", "block_scores",
    "swiglu_quantize", "engram_lookup", "engram_gate", "collapse_streams", "lay_tokens", "lay_entries", "gather_ngrams",
    "rotary_turns", "block_entries", "token_borders", "token_logprobs",
)  # fmt: skip
"""Ops whose reference no compiler has been timed with."""


def grouped_products() -> Sized:
    """K1: experts of one rank of 8 and of 64, whose tokens have one expert here, by rows an expert and their evenness."""
    ranks = ({"k": 6, "e": 48}, {"k": 1, "e": 7})
    uneven: tuple[Size, ...] = ({}, {"skew": 180}, {"zipf": 120})
    for rows, more, rank in itertools.product((4, 64, 16, 256, 878), uneven, ranks):
        for op in ("experts_up", "experts_down"):
            yield op, {"t": rank["e"] * rows // rank["k"], **rank, "d": 5120, "i": 2304, **more}


def decoding() -> Sized:
    """K2: requests x rows behind 128K tokens of layers that reuse a selection, windows alone, and scans; then 8K and 512K."""
    sizes = tuple(itertools.product((64, 8, 256), (4, 1, 6)))
    for b, each in sizes:
        yield "sparse_attention", _attention(b, each, 65_536, 512)
        yield "sparse_attention", _attention(b, each, 1024, 0)
    for b, each in sizes:
        yield "index_scores", {"b": b, "rows": each, "n": 65_536, "m": 2}
        yield "select_top", {"t": b * each, "n": 65_536, "k": 512}
    for n, b in itertools.product((4096, 262_144), (64, 8)):
        yield "sparse_attention", _attention(b, 4, n, 512)


def _attention(b: int, each: int, n: int, top: int) -> Size:
    splits = splits_of(b * each, 128 + top, fixed=False)
    return {"b": b, "rows": each, "n": n, "k": top, "h": 64, "splits": splits, "layers": 1}


def scans() -> Sized:
    """K3: index scans and the best of them, over all entries and over candidate blocks."""
    for n in (65_536, 131_072, 262_144, 32_768, 16_384, 8192):
        for b, each in ((8, 1), (8, 4), (64, 4)):
            yield "index_scores", {"b": b, "rows": each, "n": n, "m": 1 if n == 131_072 else 2}
            yield "select_top", {"t": b * each, "n": n, "k": 512}
        for t in (8, 32, 256) if n in (131_072, 262_144) else ():
            yield "select_top", {"t": t, "n": n, "k": 2048, "block": 8}
            yield "block_scores", {"t": t, "n": n, "k": 2048, "m": 1}
            yield "select_top", {"t": t, "n": 16_384, "k": 512}


def prompts() -> Sized:
    """K4: new tokens of one prompt behind held ones, in layers of half as many entries; scans in pieces, as steps make them."""
    for new, held in itertools.product((4096, 1024, 16_384), (131_072, 0, 32_768)):
        n = (held + new) // 2
        yield "sparse_attention", _attention(1, new, n, 512)
        piece = min(new, _SCORE_BYTES // (4 * n))
        if n > 512:
            yield "index_scores", {"b": piece, "rows": 1, "n": n, "m": 2, "shared": 1}
            yield "select_top", {"t": piece, "n": n, "k": 512}
        if not held:
            yield "sparse_attention", _attention(1, new, 1024, 0)


def surroundings() -> Sized:
    """K5: streams, gate, stores of entries, and n-gram rows of even and of frequent ids from three kinds of memory."""
    for t in (32, 256, 1024, 4096):
        yield "stream_coefficients", {"t": t, "d": 5120}
        yield "mix_streams", {"t": t, "d": 5120, "k": 6}
        yield "plain_linear", {"t": t, "n": 384, "k": 5120}
        yield "store_entries", {"n": t // 2, "m": 2}
        yield "store_entries", {"n": t, "m": 1}
    ids: tuple[Size, ...] = ({}, {"zipf": 129_280})
    memories = ({"rows": 40_000, "shards": 1}, {"rows": 40_000, "shards": 4}, {"rows": 10_000, "shards": 1, "host": 1})
    for t, more, memory in itertools.product((32, 1024, 4096), ids, memories):
        yield "engram_lookup", {"t": t, "w": 256, "c": 24, **memory, **more}


def under_compiler() -> Sized:
    """The references beside kernels, each at one size."""
    for op in COMPILED:
        for case in CASES:
            if case.op == op:
                yield op, case.large[COMPILED_AT.get(op, -1)]


SETS: dict[str, Callable[[], Sized]] = {
    "K1": grouped_products, "K2": decoding, "K3": scans, "K4": prompts, "K5": surroundings, "compiled": under_compiler,
}  # fmt: skip


def trials(name: str) -> list[Trial]:
    """Return what one set runs, every size once."""
    found: list[Trial] = []
    for op, size in SETS[name]():
        most = _MOST_CHECKED.get(op, {})
        small = {key: min(value, most.get(key, value)) for key, value in size.items()}
        trial: Trial = {"suite": name, "op": op, "size": size, "set": {}, "compiled": name == "compiled"}
        trial |= {"check": small} if small != size else {}
        if trial not in found:
            found.append(trial)
    return found


def main() -> int:
    parser = trials_parser(__doc__)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("sets", nargs="*", default=list(SETS))
    options = parser.parse_args()
    wanted = [trial for name in options.sets for trial in trials(name)]
    if options.list:
        print("\n".join(json.dumps(trial) for trial in wanted))
        return 0
    return run_trials(wanted, options)


if __name__ == "__main__":
    sys.exit(main())
