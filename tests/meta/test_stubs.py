"""The committed protobuf stubs are what the generator makes of the committed protos."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_committed_stubs_are_fresh(tmp_path):
    protos = sorted(str(p.relative_to(ROOT / "proto")) for p in (ROOT / "proto").rglob("*.proto"))
    binaries = Path(sys.executable).parent
    plugins = [f"--plugin=protoc-gen-{n}={binaries}/protoc-gen-{n}" for n in ("mypy", "mypy_grpc")]
    outs = [f"--{n}_out={tmp_path}" for n in ("python", "grpc_python", "mypy", "mypy_grpc")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I", "proto", *plugins, *outs, *protos],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    fresh = {p.relative_to(tmp_path): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert len(fresh) == 4 * len(protos)
    stale = [str(name) for name, data in fresh.items() if (ROOT / "proto" / name).read_bytes() != data]
    assert stale == [], "run `make proto`"
