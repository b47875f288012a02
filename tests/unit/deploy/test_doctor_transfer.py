"""What the doctor says of a machine's means to move KV."""

from dataclasses import replace

import pytest

from deploy.doctor import run_doctor
from deploy.doctor_transfer import Facts, judge, look

PLAIN = Facts(
    interfaces={"eth0": ("10.0.0.5", 10000)},
    memlock_bytes=8 << 20,
    cma_denied="",
    ptrace_scope="0",
    shm_free_bytes=8 << 30,
    adapters={},
    peer_memory=False,
    gpus=0,
    wheels={"nixl-cu12": "1.5.1", "mooncake-transfer-engine-non-cuda": "0.3.13"},
    broken={},
)


def said(**facts) -> dict[str, list[str]]:
    levels: dict[str, list[str]] = {"ok": [], "note": [], "problem": []}
    for finding in judge(replace(PLAIN, **facts)):
        levels[finding.level].append(finding.text)
    return levels


def test_a_plain_host_is_fine():
    found = said()
    assert found["note"] == found["problem"] == []
    assert "eth0 has 10.0.0.5 at 10000 Mbit/s" in found["ok"]


@pytest.mark.parametrize(
    ("facts", "level", "text"),
    [
        ({"interfaces": {}}, "note", "not between hosts"),
        ({"cma_denied": "Operation not permitted"}, "note", "--cap-add SYS_PTRACE"),
        ({"ptrace_scope": "2"}, "note", "sysctl kernel.yama.ptrace_scope=0"),
        ({"shm_free_bytes": 64 << 20}, "note", "--shm-size=2g"),
        ({"adapters": {"mlx5_0": "1: DOWN"}}, "note", "bring its link up"),
        ({"adapters": {"mlx5_0": "4: ACTIVE"}}, "problem", "--ulimit memlock=-1"),
        ({"adapters": {"mlx5_0": "4: ACTIVE"}, "gpus": 8}, "note", "modprobe nvidia_peermem"),
        ({"gpus": 1}, "note", "install mooncake-transfer-engine instead"),
        ({"wheels": {"nixl": "1.5"}}, "note", "pip install mooncake-transfer-engine-non-cuda"),
        ({"wheels": {"nixl": "1.5"}, "gpus": 1}, "note", "pip install mooncake-transfer-engine &&"),
        ({"wheels": {}}, "note", "pip install '.[nixl]'"),
        ({"broken": {"mooncake": "libibverbs.so.1: cannot open"}}, "problem", "apt-get install libibverbs1"),
        (
            {"wheels": {"mooncake-transfer-engine": "1", "mooncake-transfer-engine-non-cuda": "1"}},
            "problem",
            "overwrite each other",
        ),
    ],
)
def test_each_lack_is_one_sentence_that_says_what_to_do(facts, level, text):
    assert any(text in line for line in said(**facts)[level])


def test_enough_locked_memory_and_loaded_modules_are_fine():
    found = said(adapters={"mlx5_0": "4: ACTIVE"}, memlock_bytes=-1, peer_memory=True, gpus=1, wheels={
        "nixl": "1.5", "mooncake-transfer-engine": "0.3.13"})  # fmt: skip
    assert found["note"] == found["problem"] == []


def test_this_machine_can_be_looked_at_and_reported():
    facts, lines = look(), []
    assert facts.memlock_bytes != 0
    assert run_doctor(lines.append, judge(facts)) in (0, 1)
    assert any("/dev/shm" in line for line in lines)
