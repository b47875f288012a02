"""The destination's inbox: any order, any number of copies, each thing given out once."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import LeaseLost, NoCapacity, TransferFailed
from core.handover import Abort, Aborted, Accept, ChunkReady, Failed, Final, Gone, Prepare, Reject, Released
from core.ids import LeaseId, TransferId
from core.kv import PageRef
from kv_transfer.ticket import TransferEvent, TransferState
from kv_transfer.transfer import MAX_CHUNKS_AHEAD, Transfer
from tests.fakes.kv_pools import make_request

NAME = TransferId("t")


def accept(lease=7):
    return Accept(transfer=NAME, lease=LeaseId(lease), expires_in_s=10.0)


def chunk(number):
    return ChunkReady(transfer=NAME, chunk=number, start=16 * number, end=16 * number + 16, pages=(PageRef(1, 1),))


def final(num_chunks=3, tokens=(5,)):
    return Final(transfer=NAME, num_tokens=48, num_chunks=num_chunks, first_tokens=tokens, row=0, row_generation=1)


class Heard:
    def __init__(self):
        self.firsts, self.interrupts = [], 0
        prepare = Prepare(transfer=NAME, request=make_request(48), prefix_tokens=0, lease_ttl_s=30.0)
        self.transfer = Transfer(prepare, self.firsts.append)
        self.transfer.bind(self._interrupt)

    def _interrupt(self):
        self.interrupts += 1

    def deliver(self, *messages):
        for message in messages:
            self.transfer.deliver(message)

    @property
    def state(self):
        return self.transfer.machine.state


async def all_chunks(transfer):
    got = []
    async with asyncio.timeout(30):
        while (c := await transfer.next_chunk()) is not None:
            got.append(c.chunk)
    return got


@given(st.permutations([accept(), chunk(0), chunk(1), chunk(2), final()]), st.lists(st.integers(0, 4), max_size=8))
def test_any_order_and_any_duplicates_give_each_chunk_once_and_the_first_token_once(messages, again):
    async def run():
        heard = Heard()
        heard.deliver(*messages, *(messages[i] for i in again))
        assert await all_chunks(heard.transfer) == [0, 1, 2]
        heard.deliver(*(messages[i] for i in again))
        assert [first.tokens for first in heard.firsts] == [(5,)]
        assert heard.state is TransferState.LANDING
        assert heard.interrupts == 0

    asyncio.run(run())


async def test_the_first_token_waits_for_nothing_but_the_lease():
    heard = Heard()
    heard.deliver(final())
    assert heard.firsts == []
    heard.deliver(accept())
    assert len(heard.firsts) == 1, "no chunk has come yet"


async def test_a_second_final_or_lease_changes_nothing():
    heard = Heard()
    heard.deliver(accept(7), accept(8), final(tokens=(5,)), final(tokens=(6,)))
    assert heard.transfer.lease == 7
    assert heard.transfer.final.first_tokens == (5,)
    assert len(heard.firsts) == 1


async def test_a_missing_chunk_is_waited_for():
    heard = Heard()
    heard.deliver(accept(), chunk(0), chunk(2), final())
    assert (await heard.transfer.next_chunk()).chunk == 0
    waiting = asyncio.create_task(heard.transfer.next_chunk())
    await asyncio.sleep(0)
    assert not waiting.done()
    heard.deliver(chunk(1))
    assert (await waiting).chunk == 1


async def test_the_first_failure_wins_and_interrupts_once():
    heard = Heard()
    heard.deliver(Reject(transfer=NAME, code="no_capacity", message="full", retry_after_s=2.0))
    heard.deliver(Failed(transfer=NAME, code="worker_lost", message="later"), Gone(transfer=NAME))
    heard.transfer.fail(TransferFailed("latest"))
    assert isinstance(heard.transfer.failure, NoCapacity)
    assert heard.transfer.failure.retry_after_s == 2.0
    assert heard.interrupts == 1
    with pytest.raises(NoCapacity):
        heard.transfer.check()


async def test_a_reject_after_the_lease_answers_only_a_duplicate_question():
    heard = Heard()
    heard.deliver(accept(), Reject(transfer=NAME, code="invalid_request", message="duplicate"))
    assert heard.transfer.failure is None


async def test_gone_is_a_lost_lease():
    heard = Heard()
    heard.deliver(accept(), Gone(transfer=NAME))
    assert isinstance(heard.transfer.failure, LeaseLost)


@pytest.mark.parametrize("code", ["invariant", "internal", "config", "a code of the future"])
def test_the_sources_own_trouble_is_never_ours(code):
    heard = Heard()
    heard.deliver(Failed(transfer=NAME, code=code, message="x"))
    assert type(heard.transfer.failure) is TransferFailed


async def test_released_counts_only_as_an_answer_to_our_release():
    heard = Heard()
    heard.deliver(accept(), chunk(0), final(1), Released(transfer=NAME, valid=True))
    assert heard.state is TransferState.LANDING
    heard.transfer.machine.move(TransferEvent.LANDED)
    heard.transfer.release_sent = True
    heard.deliver(Released(transfer=NAME, valid=True), Released(transfer=NAME, valid=False))
    await heard.transfer.released()
    assert heard.state is TransferState.COMMITTED
    assert heard.transfer.failure is None


async def test_an_invalid_release_fails_and_a_later_valid_one_does_not_help():
    heard = Heard()
    heard.deliver(accept(), final(0))
    heard.transfer.machine.move(TransferEvent.LANDED)
    heard.transfer.release_sent = True
    heard.deliver(Released(transfer=NAME, valid=False), Released(transfer=NAME, valid=True))
    assert isinstance(heard.transfer.failure, LeaseLost)
    assert heard.state is TransferState.CANCELLING


async def test_a_flood_of_chunks_is_bounded():
    heard = Heard()
    heard.deliver(accept(), chunk(MAX_CHUNKS_AHEAD))
    assert isinstance(heard.transfer.failure, TransferFailed)


async def test_a_final_without_a_token_is_refused():
    heard = Heard()
    heard.deliver(accept(), final(tokens=()))
    assert isinstance(heard.transfer.failure, TransferFailed)
    assert heard.firsts == []


async def test_messages_that_mean_nothing_here_change_nothing():
    heard = Heard()
    heard.deliver(Aborted(transfer=NAME), Abort(transfer=NAME))
    assert heard.state is TransferState.INIT
