import asyncio

import pytest

from core.aio import Tasks
from core.clock import ManualClock
from core.errors import ConfigError, NamespaceMismatch, NoCapacity, UnknownModel, WorkerLost
from core.ids import Incarnation, WorkerId
from core.rpc.proof import Proof
from core.worker import KvEvent, KvEventBatch, KvSnapshot, Role
from gateway.directory import Directory
from gateway.links import Links
from gateway.membership import Membership
from gateway.prefix_index import PrefixIndex
from gateway.worker_link import LinkRules
from tests.fakes.cluster import MODEL, SECRET, load, namespace, registration
from tests.fakes.sim_decode import LocalOpener

D1 = registration("d1", Role.DECODE)
P1 = registration("p1", Role.PREFILL)


class Snapshots:
    """Answers what it is told, and counts."""

    def __init__(self):
        self.answers = {}
        self.asked = []

    async def snapshot(self, address, timeout_s=5.0):
        self.asked.append(address)
        answer = self.answers.get(address)
        if answer is None:
            raise WorkerLost("no answer")
        return answer


class Rig:
    def __init__(self):
        self.clock = ManualClock(10.0)
        self.directory = Directory(self.clock)
        self.index = PrefixIndex()
        self.links = Links(
            gateway=Incarnation("g"), opener=LocalOpener(), clock=self.clock, rules=LinkRules(), silence_s=3.0
        )
        self.snapshots = Snapshots()
        self.tasks = Tasks()
        self.seen = []
        self.membership = self.open()

    def open(self, **changes):
        return Membership(
            directory=self.directory,
            index=self.index,
            links=self.links,
            snapshots=self.snapshots,
            proof=Proof(SECRET, Incarnation("g")),
            clock=self.clock,
            tasks=self.tasks,
            model=MODEL,
            siblings=("other:1",),
            on_joined=self.seen.append,
            **changes,
        )

    async def settle(self):
        for _ in range(10):
            await asyncio.sleep(0)

    def holds(self, name, pages):
        return int(self.index.match(pages, 16)[self.directory.find(WorkerId(name)).slot])


@pytest.fixture
async def rig():
    rig = Rig()
    yield rig
    await rig.tasks.close()
    await rig.links.close()


def batch(sequence, *hashes, kind="stored"):
    return KvEventBatch(sequence=sequence, events=(KvEvent(kind=kind, hashes=hashes),))


async def test_a_worker_is_welcomed_told_of_siblings_and_linked(rig):
    welcome = rig.membership.joined(D1)
    assert (welcome.gateway, welcome.siblings, welcome.ttl_s) == ("g", ("other:1",), 3.0)
    rig.membership.joined(P1)
    assert len(rig.links) == 1
    assert rig.seen == [D1, P1]


async def test_strangers_are_refused_in_words(rig):
    rig.membership.joined(D1)
    with pytest.raises(ConfigError, match="does not know the cluster secret"):
        rig.membership.joined(registration("d2", Role.DECODE, secret_check=b"wrong"))
    with pytest.raises(UnknownModel, match="this gateway serves 'sim', worker 'd2' serves 'else'"):
        rig.membership.joined(registration("d2", Role.DECODE, model="else"))
    with pytest.raises(NamespaceMismatch):
        rig.membership.joined(registration("d2", Role.DECODE, revision="r2"))
    with pytest.raises(NoCapacity, match="already uses the name"):
        rig.membership.joined(registration("d1", Role.DECODE, incarnation="d1-b"))
    assert len(rig.directory) == 1


async def test_a_worker_of_another_tokenizer_would_say_other_words_and_is_refused(rig):
    own, other = "a" * 64, "b" * 64
    service = rig.open(tokenizer=own)
    with pytest.raises(
        ConfigError, match=r"another tokenizer.json \(bbbbbbbbbbbb\) than this gateway \(aaaaaaaaaaaa\)"
    ):
        service.joined(registration("d9", Role.DECODE, namespace=namespace(tokenizer=other)))
    assert not rig.seen
    service.joined(registration("d1", Role.DECODE, namespace=namespace(tokenizer=own)))
    assert [worker.worker_id for worker in rig.seen] == ["d1"]


async def test_pages_that_a_worker_held_before_we_came_are_fetched(rig):
    rig.snapshots.answers[D1.address] = KvSnapshot(incarnation=D1.incarnation, sequence=7, hashes=(1, 2, 3))
    rig.membership.joined(D1)
    await rig.settle()
    assert rig.holds("d1", [1, 2, 3]) == 3
    rig.membership.events(D1.incarnation, batch(8, 4))
    assert rig.holds("d1", [1, 2, 3, 4]) == 4
    assert len(rig.snapshots.asked) == 1


async def test_a_gap_fetches_a_snapshot_once(rig):
    rig.snapshots.answers[D1.address] = KvSnapshot(incarnation=D1.incarnation, sequence=0, hashes=())
    rig.membership.joined(D1)
    await rig.settle()
    rig.membership.events(D1.incarnation, batch(1, 1))
    rig.snapshots.answers[D1.address] = KvSnapshot(incarnation=D1.incarnation, sequence=4, hashes=(1, 2, 3))
    rig.membership.events(D1.incarnation, batch(4, 9))
    rig.membership.events(D1.incarnation, batch(5, 4))
    await rig.settle()
    assert len(rig.snapshots.asked) == 2
    assert rig.holds("d1", [1, 2, 3, 4]) == 4


async def test_a_goodbye_removes_the_worker_and_its_pages_at_once(rig):
    rig.snapshots.answers[D1.address] = KvSnapshot(incarnation=D1.incarnation, sequence=1, hashes=(1,))
    rig.membership.joined(D1)
    await rig.settle()
    rig.membership.left(D1.incarnation, "draining")
    assert len(rig.directory) == 0
    assert len(rig.index) == 0
    rig.membership.lost(D1.incarnation)
    rig.membership.heartbeat(D1.incarnation, load())
    assert len(rig.directory) == 0


async def test_a_restart_is_taken_in_at_once_when_the_old_stream_broke(rig):
    rig.membership.joined(D1)
    rig.membership.lost(D1.incarnation)
    again = registration("d1", Role.DECODE, incarnation="d1-b")
    rig.membership.joined(again)
    assert rig.directory.find(WorkerId("d1")).incarnation == "d1-b"
    assert [link.worker.incarnation for link in rig.links] == ["d1-b"]
    rig.membership.heartbeat(D1.incarnation, load())
    assert rig.directory.find(WorkerId("d1")).load is None


async def test_a_silent_worker_expires_and_a_late_heartbeat_brings_it_back(rig):
    rig.membership.joined(D1)
    rig.membership.heartbeat(D1.incarnation, load())
    rig.clock.advance(3.0)
    rig.membership._expire()
    assert len(rig.directory) == 0
    rig.membership.heartbeat(D1.incarnation, load())
    assert rig.directory.find(WorkerId("d1")).load is not None


async def test_a_worker_whose_stream_broke_and_lease_ended_is_forgotten(rig):
    rig.membership.joined(D1)
    rig.membership.lost(D1.incarnation)
    rig.clock.advance(3.0)
    rig.membership._expire()
    rig.membership.heartbeat(D1.incarnation, load())
    assert len(rig.directory) == 0


async def test_a_held_up_sweep_removes_nobody(rig, monkeypatch):
    monkeypatch.setattr("gateway.membership.SWEEP_S", 0.0)
    rig.membership.joined(D1)
    sweep = asyncio.create_task(rig.membership.sweep())
    await rig.settle()
    rig.clock.advance(30.0)
    await asyncio.sleep(0)
    assert len(rig.directory) == 1
    rig.membership.heartbeat(D1.incarnation, load())
    await rig.settle()
    assert len(rig.directory) == 1
    rig.clock.advance(0.9)
    await rig.settle()
    for _ in range(4):
        rig.clock.advance(0.9)
        await rig.settle()
    assert len(rig.directory) == 0
    sweep.cancel()


async def test_a_lost_link_stops_new_work_until_the_next_heartbeat(rig):
    rig.membership.joined(D1)
    rig.membership.heartbeat(D1.incarnation, load())
    slot = rig.directory.find(WorkerId("d1")).slot
    rig.membership.link_lost(D1)
    assert not rig.directory.fleet.ready[slot]
    rig.membership.heartbeat(D1.incarnation, load())
    assert rig.directory.fleet.ready[slot]
