import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from core.errors import CheckpointError
from engine.models.builtin import prepare_builtin
from engine.models.manifest import make_directory, read_manifest
from engine.models.tiny import tiny_tensors

ROOT = Path(__file__).parents[4]


def fill(directory):
    (directory / "config.json").write_text("{}")


def test_a_failed_preparation_leaves_nothing_and_can_be_repeated(tmp_path):
    def fail(directory):
        fill(directory)
        raise OSError("disk is full")

    with pytest.raises(OSError, match="disk is full"):
        make_directory(tmp_path / "m", "m", fail)
    assert [p.name for p in tmp_path.iterdir()] == ["m.lock"]
    assert read_manifest(make_directory(tmp_path / "m", "m", fill)).name == "m"


def test_a_directory_without_manifest_is_made_again(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("half of it")
    assert (make_directory(tmp_path / "m", "m", fill) / "config.json").read_text() == "{}"


RACE = """
import sys, pathlib
from engine.models.manifest import make_directory
base = pathlib.Path(sys.argv[1])
def fill(directory):
    (directory / "config.json").write_text("{}")
    with (base / "fills").open("a") as file:
        file.write("x")
sys.stdin.read()
make_directory(base / "m", "m", fill)
"""


def test_processes_that_race_fill_once(tmp_path):
    command = [sys.executable, "-c", RACE, str(tmp_path)]
    workers = [subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE) for _ in range(4)]
    for worker in workers:
        worker.stdin.close()
    assert [worker.wait(30) for worker in workers] == [0] * 4
    assert (tmp_path / "fills").read_text() == "x"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fills", "m", "m.lock"]


def test_preparing_builtins_needs_no_torch(tmp_path):
    program = (
        "import sys, pathlib; from engine.models.builtin import prepare_builtin\n"
        f"for name in ('scripted', 'tiny-window'): prepare_builtin(name, pathlib.Path({str(tmp_path)!r}))\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_tiny_weights_are_the_same_bits_everywhere():
    digest = hashlib.sha256()
    tensors = tiny_tensors("f64")
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].tobytes())
    assert digest.hexdigest()[:16] == "c5bb5bc8ec8c8795"


def test_a_damaged_manifest_is_one_plain_sentence(tmp_path):
    directory = prepare_builtin("scripted", tmp_path)
    (directory / "tandem.json").write_text(json.dumps({"name": 3}))
    with pytest.raises(CheckpointError, match="not a valid model manifest"):
        read_manifest(directory)
