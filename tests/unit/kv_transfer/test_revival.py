"""An engine that breaks is opened again: when, how often, and never after the end."""

import threading

import pytest

from core.clock import ManualClock
from core.errors import ConfigError, TransferFailed
from kv_transfer.backends.revival import CALM_S, MAX_PAUSE_S, MIN_PAUSE_S, Revival


class Engine:
    def __init__(self, generation):
        self.generation = generation
        self.broken = False
        self.closed = 0

    def close(self):
        self.closed += 1


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def revival(clock):
    return Revival("the engine", Engine, clock)


def test_it_is_opened_once_and_kept(revival):
    assert revival.get() is revival.get()
    assert revival.num_restarts == 0


def test_a_broken_one_is_closed_and_opened_again_after_a_pause_that_grows(revival, clock):
    pause = MIN_PAUSE_S
    for generation in range(1, 12):
        engine = revival.get()
        assert engine.generation == generation
        engine.broken = True
        with pytest.raises(TransferFailed, match="opened again in"):
            revival.get()
        assert engine.closed == 1
        clock.advance(pause * 0.99)
        with pytest.raises(TransferFailed):
            revival.get()
        clock.advance(pause * 0.02)
        pause = min(2 * pause, MAX_PAUSE_S)
    assert revival.get().generation == 12
    assert revival.num_restarts == 11


def test_one_that_lived_long_starts_the_pauses_anew(revival, clock):
    for _ in range(5):
        revival.get().broken = True
        with pytest.raises(TransferFailed):
            revival.get()
        clock.advance(MAX_PAUSE_S)
    engine = revival.get()
    clock.advance(CALM_S)
    engine.broken = True
    with pytest.raises(TransferFailed):
        revival.get()
    clock.advance(MIN_PAUSE_S)
    assert revival.get() is not engine


def test_a_fence_closes_that_one_and_no_later_one(revival, clock):
    first = revival.get()
    revival.fence(first)
    assert first.closed == 1
    clock.advance(MIN_PAUSE_S)
    second = revival.get()
    revival.fence(first)
    assert revival.get() is second
    assert second.closed == 0


def test_what_lives_is_told_without_opening(revival):
    with pytest.raises(TransferFailed):
        revival.living()
    engine = revival.get()
    assert revival.living() is engine
    engine.broken = True
    with pytest.raises(TransferFailed):
        revival.living()


def test_one_that_cannot_be_opened_is_tried_again_later(clock):
    refusals = [ConfigError("no memory")]

    def open_one(generation):
        if refusals:
            raise refusals.pop()
        return Engine(generation)

    revival = Revival("the engine", open_one, clock)
    with pytest.raises(ConfigError):
        revival.get()
    with pytest.raises(TransferFailed):
        revival.get()
    clock.advance(MIN_PAUSE_S)
    assert revival.get().generation == 1


def test_nothing_is_opened_after_the_end(revival):
    engine = revival.get()
    revival.close()
    revival.close()
    assert engine.closed == 1
    with pytest.raises(TransferFailed, match="closed"):
        revival.get()


def test_who_waits_to_open_again_ends_with_it(revival, clock):
    revival.fence(revival.get())
    waiting = threading.Thread(target=revival.revive)
    waiting.start()
    revival.close()
    waiting.join(60)
    assert not waiting.is_alive()
