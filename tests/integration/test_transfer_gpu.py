"""The benchmark of device memory, dry: two real processes over the fake driver. On a GPU it runs as it stands."""

import json

import pytest

from benchmarks import transfer_gpu
from benchmarks.transfer_gpu import main

FAKE = ["--memory=tests.fakes.fake_cuda:FakeGpuMemory", "--pages=8", "--page-bytes=4160", "--repeats=1"]


def test_pages_between_two_processes_are_compared_and_timed(capsys):
    assert main([*FAKE, "--transports", "cuda-ipc"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["cuda-ipc"]["bytes_equal"]
    assert result["cuda-ipc"]["all_pages"]["gb_per_s"] > 0


def test_wrong_bytes_fail_the_run(capsys, monkeypatch):
    right = transfer_gpu.pattern
    monkeypatch.setattr(transfer_gpu, "pattern", lambda pages, size: right(pages, size) ^ 1)
    assert main([*FAKE, "--transports", "cuda-ipc"]) == 1
    assert not json.loads(capsys.readouterr().out)["cuda-ipc"]["bytes_equal"]


@pytest.mark.parametrize("name", ["mori"])
def test_what_cannot_run_is_named_with_the_reason(name, capsys):
    assert main([*FAKE, "--transports", name]) == 1
    assert "MORI cannot be loaded" in json.loads(capsys.readouterr().out)[name]["did not run"]
