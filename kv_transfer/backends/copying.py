"""Copies between two mapped regions in bounded steps: what loopback and shm do on their lane's thread."""

from collections.abc import Callable

from kv_transfer.backends.lane import Job
from kv_transfer.memory import U8


def copy_in_steps(job: Job, source: U8, target: U8, step_bytes: int, before_step: Callable[[int, int], None]) -> None:
    """Copy the job's records. `before_step(first, last)` is called before the records of a step and may raise.

    A step is at least one record, or a part of a large one, and about `step_bytes`. Large slices are copied without
    the interpreter lock.
    """
    records = job.records
    source_at, target_at, sizes = (a.tolist() for a in (records.source_offsets, records.target_offsets, records.nbytes))
    index, done_of_record = 0, 0
    while index < len(sizes):
        last, room = index, step_bytes
        while last < len(sizes) and room > 0:
            room -= sizes[last] - (done_of_record if last == index else 0)
            last += 1
        before_step(index, last)
        room, moved = step_bytes, 0
        for at in range(index, last):
            n = min(sizes[at] - done_of_record, room)
            s, t = source_at[at] + done_of_record, target_at[at] + done_of_record
            target[t : t + n] = source[s : s + n]
            room -= n
            moved += n
            if done_of_record + n < sizes[at]:
                index, done_of_record = at, done_of_record + n
                break
            index, done_of_record = at + 1, 0
        job.op.landed_bytes += moved
