import asyncio

import pytest

from core.errors import WorkerLost
from core.handover import TokenLogprobs
from core.ids import Handle
from core.stream import Finished, Started
from gateway.mailbox import Failure, Mailbox, Run

STARTED = Started(handle=Handle(1), num_cached_tokens=0)
FINISHED = Finished(handle=Handle(1), reason="stop", num_output_tokens=3)


async def test_consecutive_tokens_merge_and_records_keep_their_place():
    mailbox = Mailbox(100)
    mailbox.note(STARTED)
    mailbox.deliver(0, [1])
    mailbox.deliver(1, [2, 3])
    mailbox.note(FINISHED)
    assert await mailbox.take() == [STARTED, Run(0, [1, 2, 3]), FINISHED]


async def test_tokens_that_do_not_follow_start_a_run_of_their_own():
    mailbox = Mailbox(100)
    mailbox.deliver(0, [1])
    mailbox.deliver(5, [2])
    mailbox.deliver(5, [2])
    assert await mailbox.take() == [Run(0, [1]), Run(5, [2]), Run(5, [2])]


async def test_runs_with_and_without_log_probabilities_do_not_mix():
    mailbox = Mailbox(100)
    item = TokenLogprobs(token=2, logprob=-1.0)
    mailbox.deliver(0, [1])
    mailbox.deliver(1, [2], (item,))
    mailbox.deliver(2, [2], (item,))
    assert await mailbox.take() == [Run(0, [1]), Run(1, [2, 2], [item, item])]


async def test_a_consumer_that_waits_is_woken_once_and_takes_everything():
    mailbox = Mailbox(100)
    taken = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    mailbox.deliver(0, [1])
    mailbox.deliver(1, [2])
    assert await taken == [Run(0, [1, 2])]


async def test_a_cancelled_wait_loses_nothing():
    mailbox = Mailbox(100)
    taken = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    mailbox.deliver(0, [1])
    taken.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taken
    assert await mailbox.take() == [Run(0, [1])]


async def test_tokens_beyond_the_bound_are_refused_until_some_are_taken():
    mailbox = Mailbox(3)
    assert mailbox.deliver(0, [1, 2])
    assert not mailbox.deliver(2, [3, 4])
    mailbox.note(Failure(WorkerLost("cut"), by_worker=False))
    assert len(await mailbox.take()) == 2
    assert mailbox.deliver(2, [3, 4])


async def test_a_tap_is_asked_only_while_the_consumer_waits_for_the_next_run():
    mailbox, seen = Mailbox(100), []

    def tap(position, tokens, _logprobs):
        seen.append((position, list(tokens)))
        return position < 3

    mailbox.tap = tap
    mailbox.deliver(0, [1])
    assert seen == [], "nobody waits yet: the consumer may be busy with what came before"
    assert await mailbox.take() == [Run(0, [1])]
    taking = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    mailbox.deliver(1, [2])
    mailbox.deliver(2, [3])
    assert not taking.done(), "what the tap takes wakes nobody"
    mailbox.deliver(3, [4])
    mailbox.deliver(4, [5])
    mailbox.note(FINISHED)
    assert await taking == [Run(3, [4, 5]), FINISHED]
    assert seen == [(1, [2]), (2, [3]), (3, [4])], "behind what it left, the tap is not asked"
