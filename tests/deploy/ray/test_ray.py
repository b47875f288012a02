"""T6: the tests of `inside_ray.py` in namespaces of their own: no process of Ray outlives them, and all is loopback."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
INSIDE = Path(__file__).with_name("inside_ray.py")


@pytest.fixture
def short():
    """A folder whose path leaves room for the names of Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="tr", dir="/tmp") as folder:
        yield folder


@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_a_cluster_on_ray(tmp_path, short, needs_tool):
    run_inside(tmp_path, short, needs_tool)


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_lost_node(tmp_path, short, needs_tool, monkeypatch):
    monkeypatch.setenv("TANDEM_LOSES_A_NODE", "1")
    run_inside(tmp_path, short, needs_tool, "-k", "test_up_serves or test_a_lost_node or test_down or test_cost")


def run_inside(home: Path, short: str, needs_tool, *more: str) -> None:
    """Run the tests of `inside_ray.py`, or those that `more` selects."""
    if importlib.util.find_spec("ray") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("ray is not installed; use: pip install '.[ray]'")
    private = [needs_tool("unshare"), "-p", "-n", "-u", "-f", "--mount-proc", "--kill-child"]
    if subprocess.run([*private, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine gives no private namespaces (unshare needs root)")
    # A token that an earlier Ray left in the home would turn authentication on.
    own = {
        "HOME": str(home),
        "RAY_TMPDIR": str(short),
        "RAY_AUTH_MODE": "disabled",
        "RAY_raylet_start_wait_time_s": "400",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [*private, sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-rP", "-x", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, "-o", "filterwarnings=", str(INSIDE), "--durations=0", *more],
        cwd=ROOT,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=False,
        timeout=1100,
    )
    print(run.stdout)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
