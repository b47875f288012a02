"""Every kernel at small sizes in Triton's interpreter, against its reference."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.timeout(300)
def test_every_kernel_equals_its_reference_in_the_interpreter():
    """In a process of its own: the interpreter is chosen when kernels are defined."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kernel_checks", "--small"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
