"""Work beside: ordered behind what was issued before, waited for once, and in line where there is no second stream."""

import contextlib

import pytest
import torch

from engine.models.deepseek_v41.device.beside import Beside

GPU = torch.device("cuda", 0)


class Stream:
    """Notes what waits for what."""

    def __init__(self, name, log):
        self.name, self._log = name, log

    def wait_stream(self, other):
        self._log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch):
    """What two fake streams were told."""
    found = []
    current = [Stream("main", found)]

    @contextlib.contextmanager
    def stream(chosen):
        current.append(chosen)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream("second", found))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    found.append(current)
    return found


def test_work_begins_behind_what_was_issued_and_is_waited_for_once(log):
    current = log.pop()
    beside = Beside(GPU)
    beside.join()
    assert log == []
    for number in range(2):
        with beside.work(8):
            assert current[-1].name == "second"
            log.append(f"work {number}")
    assert current[-1].name == "main"
    beside.join()
    beside.join()
    forked = "second waits for main"
    assert log == [forked, "work 0", forked, "work 1", "main waits for second"]


def test_many_rows_and_a_cpu_have_everything_in_line(log):
    current = log.pop()
    for beside, rows in ((Beside(GPU), 8192), (Beside(torch.device("cpu")), 8)):
        with beside.work(rows):
            assert current[-1].name == "main"
        beside.join()
    assert log == []
