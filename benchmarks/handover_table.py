"""Reading through tables of addresses whose second half lies on another GPU: the same results, and bytes per second.

    python -m benchmarks.handover_table --peer 1 --out FILE

One process sees both GPUs. The kernels are `engram_lookup` and `experts_up` as the model calls them; the peer's half is read
over the link between the two by the loads of the kernels themselves. Timed by replays of a graph, so without launches.
"""

import argparse
import json
import statistics
import sys
import time
import traceback
from pathlib import Path

import torch

from benchmarks.kernel_cases import CASES
from benchmarks.kernel_timing import time_us
from engine.kernels.engram_lookup import engram_lookup
from engine.kernels.experts_up import experts_up
from engine.kernels.shards import NgramColumns, Shards, shards_of

ROWS, WIDTH, COLUMNS, LENGTH, VOCAB = 1 << 22, 256, 8, 3, 50_000
TOKENS = (64, 4096, 65_536)
EXPERTS, TOP_K, WIDTH_IN, INNER = 48, 6, 5120, 2304
ROWS_EACH = (4, 64)
"""Rows per expert."""
SETS = 4
"""Different tokens that are looked up in turn."""
LINK_BYTES = 1 << 30


def link(peer: int) -> dict[str, object]:
    """Copy from the peer in one piece, as a limit."""
    here = torch.zeros(LINK_BYTES, dtype=torch.uint8, device="cuda:0")
    there = torch.zeros(LINK_BYTES, dtype=torch.uint8, device=f"cuda:{peer}")
    torch.cuda.set_device(0)
    took: list[float] = []
    for _ in range(8):  # not in a graph: it would have to capture the other GPU's stream, too
        torch.cuda.synchronize(peer)
        since = time.perf_counter()
        here.copy_(there)
        torch.cuda.synchronize(0)
        took.append(1e6 * (time.perf_counter() - since))
    took_us = statistics.median(took[1:])
    return {"nbytes": LINK_BYTES, "us": took_us, "gb_per_s": LINK_BYTES / took_us / 1e3}


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
        drawn = [torch.randint(0, VOCAB, (tokens, LENGTH), device=here, generator=draw) for _ in range(SETS)]

        def run(table: Shards, ngrams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return engram_lookup(ngrams, token_map, columns, table)

        same = all(torch.equal(a, b) for a, b in zip(run(local, drawn[0]), run(split, drawn[0]), strict=True))
        nbytes = tokens * COLUMNS * (WIDTH + WIDTH // 32)
        at_home, apart = (
            time_us([lambda ngrams=ngrams, table=table, run=run: run(table, ngrams) for ngrams in drawn], 20)[0]
            for table in (local, split)
        )
        rows[f"{tokens} tokens"] = {
            "equal": same,
            "local_us": at_home,
            "half_on_the_peer_us": apart,
            "local_gb_per_s": nbytes / at_home / 1e3,
            "from_the_peer_gb_per_s": nbytes / 2 / apart / 1e3,
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
            took[name], _ = time_us([lambda call=call: experts_up(*call)], 20)
        pairs = int(args[3][-1])
        nbytes = sum(part.nbytes for part in (*whole.codes, *whole.scales))
        rows[f"{each} rows an expert"] = {
            "equal": all(
                torch.equal(a[:pairs], b[:pairs])
                for name in ("two_buffers", "half_on_the_peer")
                for a, b in zip(made["one_buffer"], made[name], strict=True)
            ),
            **{f"{name}_us": took[name] for name in forms},
            "from_the_peer_gb_per_s": nbytes / 2 / took["half_on_the_peer"] / 1e3,
        }
    return rows


def main() -> int:
    """Measure each part, whatever becomes of the others; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found: dict[str, object] = {}
    for part in (link, gather, products):
        try:
            found[part.__name__] = part(options.peer)
        except Exception:  # noqa: BLE001 - one part's failure must not cost the others
            found[part.__name__] = {"failed": traceback.format_exc()[-3000:]}
        options.out.write_text(json.dumps(found))
        print(part.__name__, json.dumps(found[part.__name__]), flush=True)
    return int(any("failed" in row for row in found.values() if isinstance(row, dict)))


if __name__ == "__main__":
    sys.exit(main())
