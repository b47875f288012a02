"""Every kernel compiles for chips that are not here; what came out is kept by source, so that CI repeats only changes.

`python -m benchmarks.kernel_compile --update tests/unit/engine/kernels/compiled.json` refreshes the facts.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
from benchmarks.kernel_compile import Launch, facts  # noqa: E402 - it imports Triton
from benchmarks.kernel_hazards import open_products  # noqa: E402

ROOT = Path(__file__).resolve().parents[4]
FACTS = Path(__file__).parent / "compiled.json"
CHIPS = ("sm_90", "sm_100", "sm_103", "gfx950")
MATRIX_KERNELS = {"_index_scores", "_experts_up", "_experts_down", "_sparse_attention", "_chunks"}
ASYNC = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma", "sm_103": "tcgen05.mma"}


@pytest.mark.timeout(300)
def test_every_launch_compiles_and_products_use_the_matrix_units_of_their_chip(tmp_path):
    """Facts of unchanged kernels are taken as they are; a changed kernel is compiled here, for all chips."""
    facts = tmp_path / "compiled.json"
    facts.write_text(FACTS.read_text())
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kernel_compile", "--update", str(facts)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = list(json.loads(facts.read_text()).values())
    by_kernel = {name: {row["chip"] for row in rows if row["kernel"] == name} for name in {r["kernel"] for r in rows}}
    assert {name: chips for name, chips in by_kernel.items() if chips != set(CHIPS)} == {}
    assert set(by_kernel) >= MATRIX_KERNELS
    assert not [row for row in rows if "why_not" in row]
    for row in rows:
        if row["kernel"] in MATRIX_KERNELS and row["chip"] in ASYNC:
            assert ASYNC[row["chip"]] in row["matrix"], row


@pytest.mark.timeout(300)
def test_one_kernel_compiles_now_to_what_the_facts_say():
    """A control: kept facts are reproducible, so a broken compiler or harness does not hide behind them."""
    code = (
        "import json, sys; from benchmarks import kernel_compile as c;"
        "_, launch = c.wanted('sm_90', 'index_scores')[0];"
        "print(json.dumps([launch.key('sm_90'), c.facts(launch, 'sm_90')]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    key, facts = json.loads(done.stdout.splitlines()[-1])
    kept = json.loads(FACTS.read_text()).get(key)
    assert kept is None or {k: v for k, v in kept.items() if k != "op"} == facts


@triton.jit
def _nothing(X):
    tl.load(X)


def test_a_kernel_that_comes_out_without_a_body_is_refused():
    """Triton drops a body that does not fit tensor memory and says nothing."""
    launch = Launch(_nothing, {"X": "*fp32"}, {}, (), {"enable_fp_fusion": True})
    with pytest.raises(RuntimeError, match="_nothing for sm_100 has no body"):
        facts(launch, "sm_100")


OPEN = """
      %r:2 = scf.for %i = %a to %b step %c iter_args(%sum = %zero) -> (f32) {
        %words = ttg.local_load %buffer : !ttg.memdesc<128x16xi32> -> tensor<128x16xi32>
        %wide = tt.elementwise_inline_asm "prmt" %words : tensor<128x16xi32> -> tensor<128x64xbf16>
        %factor = tt.reshape %wide : tensor<128x64xbf16> -> tensor<128x64xbf16, #ttg.dot_op<{opIdx = 0}>>
        %next = ttng.warp_group_dot %factor, %keys, %sum {isAsync = true} : tensor<128x64xbf16> * !ttg.memdesc<64x16xbf16>
        scf.yield %next : f32
      }
"""
WAIT = "        %done:2 = ttng.warp_group_dot_wait %next, %keys {pendings = 0 : i32} : tensor<128x16xf32>\n"
SCORES = "        %s:2 = ttng.warp_group_dot_wait %scores, %keys {pendings = 0 : i32} : tensor<64x64xf32>\n"


def test_a_factor_that_the_next_pass_writes_too_early_is_found():
    assert len(open_products(OPEN)) == 1
    assert open_products(OPEN.replace("        scf.yield", WAIT + "        scf.yield")) == []
    # A factor that is made behind the wait for another product of the pass, as attention's weights are, is safe.
    assert open_products(OPEN.replace("        %wide =", SCORES + "        %wide =")) == []
    assert len(open_products(OPEN.replace("        %factor =", SCORES + "        %factor ="))) == 1
    assert len(open_products(OPEN.replace("        scf.yield", WAIT.replace("= 0", "= 7") + "        scf.yield"))) == 1
