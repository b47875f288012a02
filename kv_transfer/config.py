"""Settings of KV transfer: which transports, how long each wait may last, how much may be in flight.

Knows no worker and no engine. Every time is finite and in seconds; every size is in bytes.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Seconds = Annotated[float, Meta(gt=0, le=3600)]
Bytes = Annotated[int, Meta(ge=4096, le=1 << 34)]


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[transfer]` of a worker's configuration."""

    transports: Annotated[tuple[str, ...], Meta(min_length=1)] = ("auto",)
    """Names in order of preference. ``auto`` stands for shm on the same host, else tcp."""
    host: str = "127.0.0.1"
    """Address that data listeners bind."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Port of the tcp transport's data listener; 0 lets the system choose. Fixed where a network policy names it."""
    advertise_host: str = ""
    """Address that peers connect to; empty: `host`."""
    segment_directory: str = "/dev/shm"  # noqa: S108 - the system's shared-memory file system, files are 0600
    """Where shared KV segments live."""
    pull_chunks: bool = True
    """Read each chunk while the source computes the next one; false: all of them after the last, for comparison."""
    digests: bool = False
    """Ask the source for crc32 digests and verify what landed."""

    connect_timeout_s: Seconds = 2.0
    hello_timeout_s: Seconds = 5.0
    prepare_timeout_s: Seconds = 5.0
    """Until Accept or Reject; the source answers from its event loop, never from its engine."""
    release_timeout_s: Seconds = 10.0
    """Until Released; the source asks its engine, which may be inside a step."""
    lease_ttl_s: Seconds = 30.0
    max_lease_ttl_s: Seconds = 300.0
    """A peer may not ask for more."""
    orphan_ttl_s: Seconds = 10.0
    """First life of a lease: until its first heartbeat."""
    progress_timeout_s: Seconds = 10.0
    """A peer with reads in flight that lands no byte for so long has failed them."""
    op_base_timeout_s: Seconds = 10.0
    op_bytes_per_s: Annotated[float, Meta(ge=1e3)] = 10e6
    """A read may last base + bytes in flight / this rate."""
    drain_timeout_s: Seconds = 30.0
    sweep_interval_s: Seconds = 0.25

    max_leases_per_peer: Annotated[int, Meta(ge=1, le=65536)] = 1024
    max_bytes_in_flight: Bytes = 256 << 20
    """Over all reads of a destination that go through one transport."""
    max_bytes_per_op: Bytes = 32 << 20
    max_run_bytes: Bytes = 4 << 20
    """Consecutive pages are merged into copies of at most this size."""
    gather_blocks: Annotated[int, Meta(ge=0, le=1024)] = 32
    """Blocks of the kernel by which cuda-ipc reads several pages below 2 MiB at once, 32 are fastest; 0: copy engines do."""
    step_bytes: Bytes = 8 << 20
    """A copy of shared memory, or of another process's, looks for cancellation this often."""
    frame_bytes: Bytes = 4 << 20
    """Largest payload of one frame of the tcp transport."""
    native_lane: Literal["auto", "cma", "rdma", "tcp"] = "auto"
    """How a native library reaches a peer: direct memory access on one host, a network card, or sockets in a sidecar."""
    landing: Literal["auto", "staged", "direct"] = "auto"
    """Where a native library writes: a private ring that we copy from, or the pages (then only its word frees them).

    ``auto``: the pages where the call that starts a read also ends it (memory of a process on this host), else the ring."""
    landing_ring_bytes: Bytes = 64 << 20
    """Size of that ring, for each way to peers."""
    landing_slot_bytes: Bytes = 4 << 20
    """How much of a read lands before it is copied on."""
    staging_rows: Annotated[int, Meta(ge=1, le=4096)] = 8
    """How many hand-overs may read their row state at once."""

    quarantine_pages: Annotated[int, Meta(ge=1)] = 256
    """More pages than this without proof after the grace: the transport is destroyed and opened again, as the proof."""
    quarantine_grace_s: Seconds = 2.0
    """A cancelled read is usually proven over within one step; only then is it worth a fence."""
    quarantine_age_s: Seconds = 60.0
    """As above, for the oldest such page."""
    fence_timeout_s: Seconds = 30.0
    """A transport that takes longer to destroy leaves its pages without proof for ever: the worker ends."""
    breaker_failures: Annotated[int, Meta(ge=1)] = 3
    breaker_min_s: Seconds = 0.5
    breaker_max_s: Seconds = 30.0
