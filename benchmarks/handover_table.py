"""Reading through tables of addresses whose second half lies on another GPU: the same results, and bytes per second.

One process sees both GPUs. The kernels are `engram_lookup` and `experts_up` as the model calls them; the peer's half is read
over the link between the two by the loads of the kernels themselves.
"""

import statistics
from collections.abc import Callable

import torch

from benchmarks.kernel_cases import CASES
from engine.kernels.engram_lookup import engram_lookup
from engine.kernels.experts_up import experts_up
from engine.kernels.shards import NgramColumns, Shards, shards_of

ROWS, WIDTH, COLUMNS, LENGTH, VOCAB = 1 << 22, 256, 8, 3, 50_000
TOKENS = (64, 4096, 65_536)
EXPERTS, TOP_K, WIDTH_IN, INNER = 48, 6, 5120, 2304
ROWS_EACH = (4, 64)
"""Rows per expert."""
REPEATS = 20


def seconds(run: Callable[[], object]) -> float:
    """Return the median time of a call on the current GPU, after a warm-up."""
    times: list[float] = []
    for _ in range(REPEATS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(times[3:])


def gather(peer: int) -> dict[str, object]:
    """Gather from two shards here, and from one here and one on `peer`; they hold the same bytes."""
    here, there = torch.device("cuda", 0), torch.device("cuda", peer)
    torch.cuda.set_device(here)
    draw = torch.Generator(here).manual_seed(3)

    def shard(width: int) -> torch.Tensor:
        return torch.randint(0, 120, (ROWS // 2, width), dtype=torch.uint8, device=here, generator=draw)

    codes, scales = [shard(WIDTH), shard(WIDTH)], [shard(WIDTH // 32), shard(WIDTH // 32)]
    local = shards_of(codes, scales, here)
    # The copies also let each GPU read the other's memory.
    moved = [codes[0], codes[1].to(there)], [scales[0], scales[1].to(there)]
    moved[0][1][:1].to(here)
    split = shards_of(*moved, here)
    each = ROWS // COLUMNS
    columns = NgramColumns(
        multipliers=torch.tensor([7, 1_000_003, 998_244_353], device=here),
        primes=torch.full((COLUMNS,), each - 1, dtype=torch.int64, device=here),
        offsets=torch.arange(COLUMNS, device=here) * each,
        pad=0,
    )
    token_map = torch.arange(VOCAB, device=here)
    rows: dict[str, object] = {"row_bytes": WIDTH + WIDTH // 32, "columns": COLUMNS, "table_rows": ROWS}
    for tokens in TOKENS:
        ngrams = torch.randint(0, VOCAB, (tokens, LENGTH), device=here, generator=draw)

        def run(table: Shards, ngrams: torch.Tensor = ngrams) -> tuple[torch.Tensor, torch.Tensor]:
            return engram_lookup(ngrams, token_map, columns, table)

        same = all(torch.equal(a, b) for a, b in zip(run(local), run(split), strict=True))
        nbytes = tokens * COLUMNS * (WIDTH + WIDTH // 32)
        at_home, apart = seconds(lambda run=run: run(local)), seconds(lambda run=run: run(split))
        rows[f"{tokens} tokens"] = {
            "equal": same,
            "local_us": at_home * 1e6,
            "half_on_the_peer_us": apart * 1e6,
            "local_gb_per_s": nbytes / at_home / 1e9,
            "from_the_peer_gb_per_s": nbytes / 2 / apart / 1e9,
        }
    return rows


def products(peer: int) -> dict[str, object]:
    """Multiply with experts of one buffer, of two buffers here, and of one here and one on `peer`; all hold the same."""
    here, there = torch.device("cuda", 0), torch.device("cuda", peer)
    torch.cuda.set_device(here)
    size = {"e": EXPERTS, "k": TOP_K, "d": WIDTH_IN, "i": INNER}
    rows: dict[str, object] = dict(size)
    for each in ROWS_EACH:
        sized = {**size, "t": EXPERTS * each // TOP_K}
        case = next(case for case in CASES if case.op == "experts_up")
        args = list(case.make(torch.Generator(here).manual_seed(3), sized).args)
        whole = args[4]
        assert isinstance(whole, Shards)
        halves = [[part.clone() for part in one[0].chunk(2)] for one in (whole.codes, whole.scales)]
        moved = [[one[0], one[1].to(there)] for one in halves]
        moved[0][1][:1].to(here)
        forms = {
            "one_buffer": whole,
            "two_buffers": shards_of(*halves, here),
            "half_on_the_peer": shards_of(*moved, here),
        }
        made, took = {}, {}
        for name, weights in forms.items():
            call = [*args[:4], weights, *args[5:]]
            made[name] = experts_up(*call)
            took[name] = seconds(lambda call=call: experts_up(*call))
        pairs = int(args[3][-1])
        nbytes = sum(part.nbytes for part in (*whole.codes, *whole.scales))
        rows[f"{each} rows an expert"] = {
            "equal": all(
                torch.equal(a[:pairs], b[:pairs])
                for name in ("two_buffers", "half_on_the_peer")
                for a, b in zip(made["one_buffer"], made[name], strict=True)
            ),
            **{f"{name}_us": 1e6 * took[name] for name in forms},
            "from_the_peer_gb_per_s": nbytes / 2 / took["half_on_the_peer"] / 1e9,
        }
    return rows
