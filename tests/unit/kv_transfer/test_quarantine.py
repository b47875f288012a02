"""Memory leaves quarantine by proof of every operation, and by nothing else."""

from core.ids import TransferId
from kv_transfer.api import Op
from kv_transfer.quarantine import Held, Quarantine


class Owner:
    def __init__(self):
        self.proven = []

    def prove(self, pages):
        self.proven.append(tuple(pages))


class Transport:
    def __init__(self):
        self.over = set()

    def quiesced(self, op):
        return op.id in self.over


def held(owner, ids, pages, since=0.0, on_proven=lambda: None):
    ops = tuple(Op(i, TransferId("t"), 1, 0.0) for i in ids)
    return Held(ops=ops, pages=pages, owner=owner, since=since, on_proven=on_proven)


def test_every_operation_of_a_group_must_be_over():
    quarantine, owner, transport = Quarantine(), Owner(), Transport()
    quarantine.hold(held(owner, [1, 2], (7, 8)))
    transport.over = {1}
    assert quarantine.sweep(transport) == 0
    transport.over = {1, 2}
    assert quarantine.sweep(transport) == 1
    assert owner.proven == [(7, 8)]
    assert quarantine.sweep(transport) == 0
    assert owner.proven == [(7, 8)], "given back once"


def test_groups_leave_independently_and_are_counted_until_then():
    quarantine, owner, transport = Quarantine(), Owner(), Transport()
    quarantine.hold(held(owner, [1], (7, 8), since=10.0))
    quarantine.hold(held(owner, [2], (9,), since=20.0))
    assert (quarantine.num_pages, quarantine.oldest_s(25.0)) == (3, 15.0)
    assert quarantine.num_pages_since(15.0) == 2
    transport.over = {1}
    quarantine.sweep(transport)
    assert (quarantine.num_pages, quarantine.oldest_s(25.0)) == (1, 5.0)
    assert len(quarantine) == 1


def test_no_age_releases_anything():
    quarantine, owner = Quarantine(), Owner()
    quarantine.hold(held(owner, [1], (7,)))
    assert quarantine.oldest_s(1e9) == 1e9
    quarantine.sweep(Transport())
    assert owner.proven == []


def test_what_a_release_triggers_may_hold_again():
    quarantine, owner, transport = Quarantine(), Owner(), Transport()
    transport.over = {1}
    quarantine.hold(held(owner, [1], (7,), on_proven=lambda: quarantine.hold(held(owner, [2], (8,)))))
    quarantine.sweep(transport)
    assert quarantine.num_pages == 1
