import numpy as np
import pytest
import torch

from core.errors import ConfigError
from engine.models.deepseek_v41.replay import ReplayRule
from tests.fakes.deepseek_driver import PAGE, Driver, Truth, reference, text, tiny_model

CLOSE = {"atol": 1e-9, "rtol": 0}
WINDOW, KEEP, LENGTH = 8, 20, 60
ENCODER, DECODER = range(8), range(8, 14)
CHUNKINGS = [[60], [59, 1], [30, 10, 1, 19], [41, 19], [7, 13, 20, 19, 1], [57, 1, 1, 1]]


def prefill(model, ids, sizes, deterministic=False):
    """Feed a prompt in chunks; returns the driver and the last token's logits."""
    driver = Driver(model, deterministic=deterministic)
    driver.restart(1, known=len(ids))
    done = 0
    for n in sizes:
        done += n
        logits = driver.step({1: ids[done - n : done]}, wanted={1: int(done == len(ids))})[1]
    return driver, logits[0]


def masked(ids, decode=()):
    """The oracle: every row runs, decoder windows are narrowed."""
    truth = Truth(reference(), ReplayRule(mode="mask", keep=KEEP, known_tokens=len(ids)))
    return torch.cat((truth.run(ids)[-1:], *(truth.run([token]) for token in decode)))


@pytest.fixture(scope="module")
def expected():
    ids, decode = text(2, LENGTH), text(3, 4)
    return ids, decode, masked(ids, decode)


@pytest.mark.parametrize("mode", ["mask", "compact"])
@pytest.mark.parametrize("sizes", CHUNKINGS)
def test_a_replayed_prompt_equals_the_masked_reference_in_any_chunking(expected, mode, sizes):
    ids, decode, truth = expected
    driver, last = prefill(tiny_model(mode=mode), ids, sizes)
    torch.testing.assert_close(last, truth[0], **CLOSE)
    for token, logits in zip(decode, truth[1:], strict=True):
        torch.testing.assert_close(driver.step({1: [token]})[1][0], logits, **CLOSE)


def test_compact_is_equal_to_the_bit_in_any_chunking_when_deterministic(expected):
    ids, _, truth = expected
    for dtype in (torch.float32, torch.float64):
        model = tiny_model(dtype, "compact")
        lasts = [prefill(model, ids, sizes, deterministic=True)[1] for sizes in ([60], [30, 10, 1, 19], [59, 1])]
        assert all(torch.equal(last, lasts[0]) for last in lasts)
    torch.testing.assert_close(lasts[0], truth[0], **CLOSE)


def test_replay_is_an_approximation_and_short_prompts_are_exact():
    ids = text(2, LENGTH)
    _, approximate = prefill(tiny_model(mode="compact"), ids, [LENGTH])
    _, exact = prefill(tiny_model(), ids, [LENGTH])
    assert (approximate - exact).abs().max() > 1e-3
    for length in (1, WINDOW, KEEP):
        short = [prefill(tiny_model(mode=mode), ids[:length], [length])[1] for mode in ("compact", "off")]
        torch.testing.assert_close(*short, **CLOSE)


@pytest.mark.parametrize("sizes", CHUNKINGS)
def test_only_the_last_known_tokens_run_through_the_decoder(sizes):
    model = tiny_model(mode="compact")
    prefill(model, text(2, LENGTH), sizes)
    assert [model.executed_rows[i] for i in ENCODER] == [LENGTH] * 8
    assert [model.executed_rows[i] for i in DECODER] == [KEEP] * 6
    whole = tiny_model(mode="mask")
    prefill(whole, text(2, LENGTH), sizes)
    assert whole.executed_rows == [LENGTH] * 14


def test_a_row_whose_known_tokens_are_not_told_runs_whole():
    ids = text(2, LENGTH)
    model = tiny_model(mode="compact")
    whole = Truth(reference()).run(ids)
    torch.testing.assert_close(Driver(model).step({0: ids})[0], whole, **CLOSE)
    assert model.executed_rows == [LENGTH] * 14


def test_a_batch_may_mix_prompts_that_end_before_the_decoder_with_rows_that_run_whole(expected):
    ids, decode, truth = expected
    driver = Driver(tiny_model(mode="compact"))
    driver.restart(1, known=LENGTH)
    driver.restart(0, known=5)
    driver.restart(3, known=50)
    other, long = text(8, 12), text(9, 50)
    short = Truth(reference()).run(other)
    driver.step({1: ids[:20], 0: other[:5], 3: long[:10]}, wanted={1: 0, 0: 1, 3: 0})
    got = driver.step({3: long[10:25], 0: other[5:6], 1: ids[20:]}, wanted={3: 0, 0: 1, 1: 1})
    torch.testing.assert_close(got[1][0], truth[0], **CLOSE)
    torch.testing.assert_close(got[0][0], short[5], **CLOSE)
    got = driver.step({1: decode[:1], 3: long[25:]}, wanted={1: 1, 3: 1})
    torch.testing.assert_close(got[1][0], truth[1], **CLOSE)
    torch.testing.assert_close(got[3][0], masked(long)[0], **CLOSE)


def hit(driver, source, target, prefix, cached, replayed, **fields):
    """Let a row begin behind a prefix hit: it shares the pages, and runs the last cached tokens again."""
    driver.tables[target, : cached // PAGE] = driver.tables[source, : cached // PAGE]
    floor = cached - min(cached, replayed)
    driver.restart(target, prefix, floor, floor=floor, write_from=cached, **fields)
    return floor


def checksum(driver, row, tokens):
    pages = driver.kv.paged("global")[torch.from_numpy(driver.tables[row, : tokens // PAGE])]
    return pages.clone()


@pytest.mark.parametrize("mode", ["off", "compact"])
@pytest.mark.parametrize(
    ("cached", "replayed", "length"), [(40, 8, 60), (40, 8, 44), (16, 8, 60), (8, 8, 30), (40, 5, 60)]
)
def test_encoder_replay_after_a_hit_equals_the_floor_masked_reference(mode, cached, replayed, length):
    ids, decode = text(2, length), text(6, 3)
    driver = Driver(tiny_model(mode=mode))
    driver.step({0: ids[:cached]})
    before = checksum(driver, 0, cached)
    floor = hit(driver, 0, 2, ids[:cached], cached, replayed, known=length)

    # The reference has the same entries, no window rows and no pending rows.
    rule = ReplayRule(
        mode="mask" if mode == "compact" else "off", keep=KEEP, known_tokens=length, floor=floor, write_from=cached
    )
    truth = Truth(reference())
    truth.run(ids[:cached])
    with torch.inference_mode():
        for rows in (*truth.cache.windows, *truth.cache.pending.values()):
            rows.forget(0, cached)
    truth.rule = rule
    truth.cache.rewind(cached)
    truth.cache.extend(ids[cached:])
    with torch.inference_mode():
        wanted = truth.model.forward(truth.cache, floor, length, rule).logits[-1]

    middle = (floor + length) // 2
    driver.step({2: ids[floor:middle]}, wanted={2: 0})
    got = driver.step({2: ids[middle:]}, wanted={2: 1})[2][0]
    torch.testing.assert_close(got, wanted, **CLOSE)
    assert torch.equal(checksum(driver, 2, cached), before), "shared pages were written"
    for token in decode:
        torch.testing.assert_close(driver.step({2: [token]})[2][0], truth.run([token])[0], **CLOSE)


def test_work_after_a_hit_is_the_replayed_and_new_rows_only():
    ids = text(2, LENGTH)
    model = tiny_model(mode="compact")
    driver = Driver(model)
    driver.restart(0, known=0)
    driver.step({0: ids[:40]})
    before = np.array(model.executed_rows)
    floor = hit(driver, 0, 2, ids[:40], 40, 8, known=LENGTH)
    driver.step({2: ids[floor:]}, wanted={2: 1})
    done = np.array(model.executed_rows) - before
    assert done.tolist() == [LENGTH - 40 + 8] * 8 + [KEEP] * 6


def test_settings_that_would_lose_needed_rows_are_refused():
    with pytest.raises(ConfigError, match="at least 14"):
        tiny_model(mode="compact", keep=13)
    with pytest.raises(ConfigError, match="mode"):
        tiny_model(mode="sometimes")


def test_the_draft_model_is_given_the_rows_of_the_decoder_windows_in_either_mode():
    ids, seen = text(2, LENGTH), []
    for mode in ("mask", "compact"):
        driver = Driver(tiny_model(mode=mode))
        driver.restart(1, known=LENGTH)
        driver.step({1: ids[:45], 0: [5, 6]}, wanted={1: 0, 0: 1})
        seen.append(driver.last[1])
    assert seen[0].at.tolist() == seen[1].at.tolist() == [40, 41, 42, 43, 44, 45, 46]
    torch.testing.assert_close(seen[0].values, seen[1].values, **CLOSE)
