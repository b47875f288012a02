from core.hashing import event_hash
from core.ids import Incarnation, PageHash
from engine.cache.events import EventRecorder, NullRecorder

A, B, C = (PageHash(bytes([n]) * 32) for n in range(3))
HERE = Incarnation("here")


def test_nothing_recorded_is_no_batch_and_takes_no_number():
    recorder = EventRecorder()
    assert recorder.drain() is None
    assert recorder.sequence == 0


def test_batches_are_numbered_from_one_and_keep_the_order_of_events():
    recorder = EventRecorder()
    recorder.stored([A, B], None)
    recorder.removed([B])
    recorder.stored([B], A)
    first = recorder.drain()
    recorder.cleared()
    second = recorder.drain()
    assert (first.sequence, second.sequence) == (1, 2)
    assert [(e.kind, e.hashes, e.parent) for e in first.events] == [
        ("stored", (event_hash(A), event_hash(B)), 0),
        ("removed", (event_hash(B),), 0),
        ("stored", (event_hash(B),), event_hash(A)),
    ]
    assert [e.kind for e in second.events] == ["cleared"]


def test_removals_in_a_row_travel_as_one_event():
    recorder = EventRecorder()
    recorder.stored([A, B], None)
    recorder.removed([B])
    recorder.removed([A])
    assert [e.hashes for e in recorder.drain().events[1:]] == [(event_hash(B), event_hash(A))]


def test_a_snapshot_is_as_of_the_last_batch():
    recorder = EventRecorder()
    recorder.stored([A, B], None)
    recorder.drain()
    recorder.removed([B])
    recorder.stored([C], A)
    snapshot = recorder.snapshot(HERE)
    assert (snapshot.incarnation, snapshot.sequence) == (HERE, 1)
    assert snapshot.hashes == (event_hash(A), event_hash(B))
    recorder.drain()
    assert recorder.snapshot(HERE).hashes == (event_hash(A), event_hash(C))
    recorder.cleared()
    recorder.drain()
    assert recorder.snapshot(HERE).hashes == ()


def test_a_recorded_list_may_be_reused_by_the_caller():
    recorder = EventRecorder()
    hashes = [A]
    recorder.stored(hashes, None)
    hashes.append(B)
    assert recorder.drain().events[0].hashes == (event_hash(A),)


def test_the_null_recorder_takes_everything():
    recorder = NullRecorder()
    recorder.stored([A], None)
    recorder.removed([A])
    recorder.cleared()
