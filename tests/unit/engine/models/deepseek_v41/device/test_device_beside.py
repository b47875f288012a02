"""Work beside: ordered behind what was issued before, waited for once, and in line where there is no second stream.

A watch over every torch call of a step finds what would race on a device: tensors that both streams touch before they
join, and tensors that are let go of while work beside may still read them.
"""

import contextlib
import functools

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.models.deepseek_v41.device.beside import Beside
from engine.models.drafter import DraftRows
from tests.fakes.deepseek_driver import Driver, text
from tests.fakes.device_deepseek import device_model

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
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
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


def test_many_rows_a_cpu_and_what_is_not_recorded_have_everything_in_line(log, monkeypatch):
    current = log.pop()
    for beside, rows, is_recorded in (
        (Beside(GPU), 8192, True), (Beside(torch.device("cpu")), 8, True), (Beside(GPU), 8, False)
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=is_recorded: now)
        with beside.work(rows):
            assert current[-1].name == "main"
        beside.join()
    assert log == []


class Watch(TorchDispatchMode):
    """Follows which memory is touched inside work and outside of it."""

    def __init__(self):
        super().__init__()
        self.is_beside = False
        self.blocks = 0
        self.joined()

    def joined(self):
        self.read, self.written, self.made = {}, set(), []

    def join(self):
        lost = [place for place, reference in self.read.items() if place not in self.written and reference.expired()]
        assert not lost, "memory that work beside reads was let go of before the streams joined"
        self.joined()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        arguments = func._schema.arguments
        given = dict(zip((a.name for a in arguments), args, strict=False)) | (kwargs or {})
        reads = {self.place(t): t for t in tree_leaves(given) if torch.is_tensor(t) and self.place(t)}
        changed = [given[a.name] for a in arguments if a.alias_info and a.alias_info.is_write and a.name in given]
        # What a call returns is fresh unless it lies where an argument does: a view.
        fresh = [t for t in tree_leaves(out) if torch.is_tensor(t) and self.place(t) not in reads]
        if func is torch.ops.aten.lift_fresh.default:
            # A constant, which comes into being unseen.
            fresh = list(reads.values())
        if not fresh and not changed:
            return out
        writes = {self.place(t) for t in (*changed, *fresh)} - {0}
        if self.is_beside:
            self.read |= {place: StorageWeakRef(t.untyped_storage()) for place, t in reads.items()}
            self.written |= writes
            self.made += [*fresh, *changed]
        else:
            raced = (writes & (self.written | set(self.read))) | (set(reads) & self.written)
            assert not raced, f"{func} touches what work beside touches: {raced}"
        return out

    @staticmethod
    def place(tensor):
        return tensor.untyped_storage().data_ptr()

    @contextlib.contextmanager
    def work(self, _):
        self.is_beside, self.blocks = True, self.blocks + 1
        yield
        self.is_beside = False


def watched(monkeypatch, run, *, joins=True):
    """Run something under a watch."""
    watch = Watch()
    monkeypatch.setattr(Beside, "work", lambda _, rows: watch.work(rows))
    monkeypatch.setattr(Beside, "join", lambda _: watch.join() if joins else None)
    with watch:
        run()
    return watch


@pytest.mark.parametrize("mode", ["off", "compact"])
def test_no_step_touches_what_work_beside_touches_before_they_join(mode, monkeypatch):
    driver = Driver(device_model(mode))
    driver.step({0: text(0, 21), 1: text(1, 9)})
    if mode == "compact":
        driver.restart(0, text(0, 21)[:16], 16, floor=16, known=40, write_from=16)
    layers = len(driver.model.layers)
    for chunks in ({0: text(2, 24)}, {0: [5], 1: [6]}, {0: [7, 8, 9]}):
        watch = watched(monkeypatch, functools.partial(driver.step, chunks))
        assert watch.blocks > 2 * layers
        assert not watch.written


def test_a_step_that_does_not_join_is_found(monkeypatch):
    driver = Driver(device_model())
    driver.step({0: text(0, 21)})
    with pytest.raises(AssertionError, match="touches what work beside touches"):
        watched(monkeypatch, lambda: driver.step({0: [5]}), joins=False)


def test_no_proposal_touches_what_work_beside_touches_before_they_join(monkeypatch):
    driver = Driver(device_model())
    drafter = driver.model.drafter(driver.kv)
    driver.step({0: text(0, 21)})
    drafter.observe(*driver.last, np.array([21], np.int32))
    wanted = DraftRows(np.array([0], np.int32), np.array([5]), np.array([21]))
    watch = watched(monkeypatch, lambda: drafter.propose(wanted, lambda _, logits: logits.argmax(1)))
    assert watch.blocks == 2 * len(driver.model.config.stages)
    assert not watch.written
