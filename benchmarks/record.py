"""Writes benchmark records: the raw result with the command, the machine and the commit that produced it."""

import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, object]:
    """Return what of this machine bears on a figure."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(names) or None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def commit() -> str:
    """Return the commit, marked if the tree had changes of product code."""
    root = Path(__file__).parents[1]
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.strip()
    dirty = subprocess.run(
        ["git", "status", "--porcelain", "-uno"], cwd=root, capture_output=True, text=True, check=True
    )
    return head + ("-dirty" if dirty.stdout.strip() else "")


def write_record(name: str, result: object, *, note: str = "", directory: Path = RESULTS, commit_run: str = "") -> Path:
    """Write ``<name>.json``; the command is this process's own. `commit_run` is told where there is no repository."""
    directory.mkdir(exist_ok=True)
    path = directory / f"{name}.json"
    body = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *(str(Path(a).name) if a.startswith("/") else a for a in sys.argv)]),
        "commit": commit_run or commit(),
        "machine": machine(),
        "note": note,
        "result": result,
    }
    path.write_text(json.dumps(body, indent=1) + "\n")
    return path
