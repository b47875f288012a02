"""A24: the commands of the Kubernetes page are run as they stand; those that need a cluster are run by the lab."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.deploy.overlays import TOOLS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "deploy-k8s.md"


def blocks(kind=""):
    """The page's shell blocks: without a cluster, or (`cluster`) with one."""
    return re.findall(rf"^```sh{' ' + kind if kind else ''}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def run(block, folder, path):
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_commands_without_a_cluster_work_as_written(tmp_path):
    found = blocks()
    assert len(found) == 2
    for block in found:
        done = run(block, tmp_path, f"{TOOLS}:{os.environ['PATH']}")
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "my-cluster/config/decode.toml").exists()
    assert (tmp_path / "etc-tandem/gateway.toml").exists()


def test_every_other_block_is_the_labs():
    fences = re.findall(r"^```(\S+.*)$", PAGE.read_text(), re.MULTILINE)
    assert sorted(set(fences)) == ["sh", "sh cluster"]
    assert len(blocks("cluster")) == 2


@pytest.mark.parametrize("word", ["scale", "rollout", "status"])
def test_a_command_that_needs_a_cluster_says_so_without_one(word, tmp_path):
    """The page's own commands, against an API server that is not there."""
    (tmp_path / "kubeconfig").write_text('{"apiVersion": "v1", "kind": "Config", "clusters": [], "contexts": []}')
    line = next(ln for b in blocks("cluster") for ln in b.splitlines() if ln.startswith(f"tandem {word}"))
    done = run(f"KUBECONFIG={tmp_path}/kubeconfig {line}", tmp_path, f"{TOOLS}:{os.environ['PATH']}")
    assert done.returncode == 3
    assert done.stderr.startswith(("tandem: kubectl", "tandem: decode was not rolled out"))
