"""A gather through a table of addresses whose second half lies on another GPU: the same rows, and bytes per second.

One process sees both GPUs. The kernel is `engine.kernels.engram_lookup` as the model calls it; the peer's half is read over
the link between the two by the loads of the kernel itself.
"""

import statistics
from collections.abc import Callable

import torch

from engine.kernels.engram_lookup import engram_lookup
from engine.kernels.shards import NgramColumns, TableShards, table_shards

ROWS, WIDTH, COLUMNS, LENGTH, VOCAB = 1 << 22, 256, 8, 3, 50_000
TOKENS = (64, 4096, 65_536)
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
    local = table_shards(codes, scales, here)
    # The copies also let each GPU read the other's memory.
    moved = [codes[0], codes[1].to(there)], [scales[0], scales[1].to(there)]
    moved[0][1][:1].to(here)
    split = table_shards(*moved, here)
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

        def run(table: TableShards, ngrams: torch.Tensor = ngrams) -> tuple[torch.Tensor, torch.Tensor]:
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
