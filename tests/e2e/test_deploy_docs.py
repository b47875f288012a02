"""docs/deploy.md: every command of the page for this machine, in its order, as it stands.

Replaced are only what a test must not share: the home directory, the port, and the model by one that loads at once.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.sweep import leftovers
from tests.fakes.live_cluster import ROOT, serving, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PAGE = (ROOT / "docs/deploy.md").read_text()


def blocks(text, kind):
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start_up(command, log, **where):
    with log.open("w") as out:
        up = subprocess.Popen(["/bin/sh", "-c", f"exec {command}"], stdout=out, stderr=out, **where)
    wait_for(lambda: serving(log) or up.poll() is not None, 120, "it does not serve")
    assert up.poll() is None, log.read_text()
    return up


def test_every_command_of_the_page_works_as_it_stands(tmp_path):
    port = str(free_port())

    def here(text):
        return text.replace("8000", port).replace("smollm2", "scripted")

    [description] = blocks(PAGE, "yaml")
    (tmp_path / "cluster.yaml").write_text(here(description))
    commands = [line for block in blocks(PAGE, "sh") for line in here(block).splitlines()]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    home = {"HOME": str(tmp_path), "PATH": path, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    where = {"cwd": tmp_path, "env": {**os.environ, **home}}
    log, up, said = tmp_path / "up.log", None, {}
    try:
        for command in commands:
            if command.startswith("tandem up"):
                up = start_up(command, log, **where)
                continue
            shell = ["/bin/sh", "-c", command]
            run = subprocess.run(shell, capture_output=True, text=True, timeout=200, check=False, **where)
            assert run.returncode == 0, command + run.stdout + run.stderr + log.read_text()
            said[command.partition(" http")[0]] = run.stdout
        assert up.wait(60) == 0
    finally:
        if up is not None and up.poll() is None:
            up.terminate()
            up.wait(60)
    assert re.search(r"decode-1: ready after [\d.]+ s", log.read_text())
    assert "[DONE]" in said["curl -sN"]
    assert "decode-2: gone" in said["tandem drain decode-2"]
    assert "the cluster is gone" in said["tandem down"]
    pids = [int(pid) for text in said.values() for pid in re.findall(r"ready +\d+ +(\d+)", text)]
    assert len(set(pids)) >= 5
    assert leftovers(pids, tmp_path / ".tandem/run/default") == []
    socket.create_server(("127.0.0.1", int(port))).close()  # nobody holds it any more
