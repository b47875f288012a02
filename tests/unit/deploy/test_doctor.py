"""What the doctor says of facts."""

import socket

from deploy.doctor import (
    check_distribution,
    check_gpus,
    check_kernel,
    check_memory,
    check_port,
    check_python,
    check_shared_memory,
    findings,
    run_doctor,
)


def test_facts_that_suffice_are_ok():
    assert check_python((3, 12)).level == "ok"
    assert check_shared_memory(8 << 30).level == "ok"
    assert check_memory(16 << 30).level == "ok"
    assert check_kernel("0\n").level == "ok"
    assert check_distribution("msgspec", "worker", "nothing works").level == "ok"
    assert check_distribution(("no-such-package", "msgspec"), "worker", "nothing works").text.startswith("msgspec ")


def test_facts_that_do_not_suffice_say_what_to_do():
    assert check_python((3, 10)).level == "problem"
    assert "--transfer tcp" in check_shared_memory(64 << 20).text
    assert "fewer workers" in check_memory(1 << 30).text
    assert "TCP" in check_kernel("1\n").text
    assert "pip install '.[nixl]'" in check_distribution("no-such-package", "nixl", "nixl is missing").text


def test_a_taken_port_is_noted():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert "in use" in check_port(server.getsockname()[1]).text


def test_the_report_has_a_line_per_finding_and_fails_only_on_problems():
    lines = []
    found = findings()
    code = run_doctor(lines.append, found)
    assert len(lines) == len(found)
    assert code == (1 if any(line.startswith("problem") for line in lines) else 0)


def test_gpus_are_named_as_settings_name_them():
    text = check_gpus([("NVIDIA H200", 150 << 30), ("NVIDIA H200", 150 << 30)]).text
    assert "cuda:0 NVIDIA H200 with 150.0 GiB, cuda:1 NVIDIA H200" in text
    assert check_gpus([], "no driver").text == "no GPU (no driver): models run on the CPU"
