"""Decode policy: which rows step, which need a page, what admission must leave free, and who is retracted.

Pure functions over arrays: no clock, no pool, no sequences.
"""

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]


def can_step(scheduled: I32, max_len: I32) -> Mask:
    """Return which running rows take part in the next step.

    After a step that computed KV up to `scheduled`, the token at that index exists (it may still be in flight), so
    a row whose last allowed token is already there stops by length and is left out before anybody saw the token.
    """
    return scheduled + 1 < max_len


def needs_page(scheduled: I32, num_pages: I32, page_tokens: int) -> Mask:
    """Return which rows have no slot for their next token."""
    return scheduled >= num_pages * page_tokens


def needs_page_soon(scheduled: I32, num_pages: I32, page_tokens: int, steps: int) -> Mask:
    """Return which rows run out of slots within `steps` further steps: room for them is made ahead."""
    return scheduled + steps >= num_pages * page_tokens


def growth_pages(horizon_tokens: int, page_tokens: int) -> int:
    """Return the pages that each active sequence gets room for: the output horizon, and one to begin it."""
    return -(-horizon_tokens // page_tokens) + 1


def pages_to_finish(scheduled: I32, max_len: I32, num_pages: I32, page_tokens: int) -> int:
    """Return the most pages that any of the rows still needs to reach its length bound; 0 without rows."""
    if not len(scheduled):
        return 0
    # The last token of a sequence is never written to KV.
    final = -(-np.maximum(max_len - 1, scheduled) // page_tokens)
    return max(0, int((final - num_pages).max()))


def admission_margin(num_active: int, each: int, to_finish: int, finish_cap: int) -> int:
    """Return the pages that must stay free beside an admission: growth of all, and one row's way to its end."""
    return num_active * each + min(to_finish, finish_cap)


def booking_room(free: int, evictable: int, promised: int) -> int:
    """Return the pages that are neither held nor promised. Pages behind a fence are not counted: they are not here yet."""
    return free + evictable - promised


def victim_order(*, priority: I32, produced: I32, num_pages: I32, preempts: U8, arrival: I64, max_preempts: int) -> I64:
    """Return row indices, first to retract first: pinned ones last, then lowest class, fewest produced tokens,
    most pages, latest arrival. Pinned: retracted `max_preempts` times already.
    """
    pinned = preempts >= max_preempts
    return np.lexsort((-arrival, -num_pages, produced, -priority, pinned))
