import numpy as np

from engine.runner.token_history import TokenHistory

I32 = np.int32


def write(history, row, start, tokens):
    history.write(
        np.array([row], I32),
        np.array([0, len(tokens)], I32),
        np.arange(start, start + len(tokens)),
        np.array(tokens, np.int64),
    )


def before(history, row, start):
    return history.before(np.array([row], I32), np.array([start], np.int64))[0].tolist()


def test_tokens_before_the_first_position_are_minus_one():
    history = TokenHistory(2, 3, 6)
    history.reset(1, np.array([7, 8, 9], I32), 0)
    assert before(history, 1, 0) == [-1, -1, -1]
    write(history, 1, 0, [7, 8])
    assert before(history, 1, 2) == [-1, 7, 8]


def test_a_row_that_starts_behind_a_hit_knows_the_tokens_before_it():
    history = TokenHistory(1, 3, 6)
    history.reset(0, np.arange(100, 130, dtype=I32), 20)
    assert before(history, 0, 20) == [117, 118, 119]


def test_only_the_end_of_a_long_chunk_is_kept_and_rows_stay_apart():
    history = TokenHistory(3, 3, 6)
    history.write(
        np.array([2, 0], I32),
        np.array([0, 40, 42], I32),
        np.concatenate((np.arange(40), np.arange(5, 7))),
        np.concatenate((np.arange(40), [50, 51])),
    )
    assert before(history, 2, 40) == [37, 38, 39]
    assert before(history, 0, 7)[1:] == [50, 51]


def test_rejected_tokens_are_forgotten_by_writing_on_from_the_accepted_length():
    history = TokenHistory(1, 3, 6)
    write(history, 0, 0, [1, 2, 3, 4])
    write(history, 0, 4, [5, 60, 61, 62, 63, 64])
    assert before(history, 0, 5) == [3, 4, 5]
    write(history, 0, 5, [6, 70, 71, 72, 73, 74])
    assert before(history, 0, 6) == [4, 5, 6]


def test_a_new_owner_of_a_row_sees_nothing_of_the_last_one():
    history = TokenHistory(1, 3, 6)
    write(history, 0, 0, list(range(1, 20)))
    history.reset(0, np.array([5], I32), 1)
    assert before(history, 0, 1) == [-1, -1, 5]
