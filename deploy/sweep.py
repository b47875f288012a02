"""What a cluster that has ended may have left on this machine: looks, never touches."""

from pathlib import Path

import psutil

from kv_transfer.memory import SEGMENT_PREFIX

SHARED_MEMORY = Path("/dev/shm")


def leftovers(pids: list[int], run_dir: Path) -> list[str]:
    """Return one sentence per process, port or segment that outlived its cluster."""
    alive = [pid for pid in pids if _alive(pid)]
    found = [f"process {pid} is still alive" for pid in alive]
    found += [f"shared-memory segment {name} is left" for name in segments_of(pids)]
    found += [f"socket {path.name} is left in the run directory" for path in run_dir.glob("*.sock")]
    return found


def segments_of(pids: list[int]) -> list[str]:
    """Return the names of segments that carry one of these pids."""
    if not SHARED_MEMORY.is_dir():
        return []
    marks = [f"-{pid}-" for pid in pids]
    return [
        p.name for p in SHARED_MEMORY.iterdir() if p.name.startswith(SEGMENT_PREFIX) and any(m in p.name for m in marks)
    ]


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
