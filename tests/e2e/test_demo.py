"""`tandem demo`, as `make demo` runs it, with a small model."""

import subprocess
import sys

import pytest

from tests.fakes.live_cluster import ROOT

pytestmark = [pytest.mark.cluster]


@pytest.mark.parametrize("transfer", ["auto", "tcp"])
def test_the_demo_holds_its_promises(transfer):
    command = [sys.executable, "-m", "deploy.cli", "demo", "--model", "scripted", "--transfer", transfer]
    command += ["--question", "Say hello in five languages."]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Hello, 你好, Привет, مرحبا, Γειά 🙂" in run.stdout
    assert "recomputed by decode     0 tokens" in run.stdout
    pulled = next(line for line in run.stdout.splitlines() if line.startswith("KV pulled by decode")).split()[-2]
    assert int(pulled) > 0
