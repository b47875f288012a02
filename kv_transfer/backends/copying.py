"""Copies between two mapped regions in bounded steps: what loopback and shm do on their lane's thread."""

from collections.abc import Callable

from kv_transfer.api import Records
from kv_transfer.backends.lane import Job
from kv_transfer.plan import split
from kv_transfer.views import Bytes, copy_records

_MAX_RECORDS = 1024
"""Of a step: so many small copies take less than the interpreter's switch interval."""


def copy_in_steps(
    job: Job, source: Bytes, target: Bytes, step_bytes: int, before_step: Callable[[Records], None]
) -> None:
    """Copy the job's records in order. `before_step` is called with the copies of each step and may raise.

    A step is at most `step_bytes`.
    """
    for part in split(job.records, _MAX_RECORDS, step_bytes):
        before_step(part)
        copy_records(target, source, part.target_offsets, part.source_offsets, part.nbytes)
        job.op.landed_bytes += part.total_bytes
