"""Records live traffic as a Mooncake-format trace: times, lengths and keyed block hashes, never text or ids.

One JSON line a request: `timestamp` [ms since the start], `input_length`, `output_length`, `hash_ids` (one number a
full page, equal iff the whole prefix is equal), `block_size` [tokens a page], `session` if the client named one. Hashes are mixed with a secret of the file, so that two files, or a file and a cache, cannot be
compared. Bounded by bytes; event loop's thread; a line is written when its request ends.
"""

import asyncio
import hashlib
import secrets
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
from msgspec import Meta

from core.clock import Clock
from gateway.router import Work, session_of

FLUSH_BYTES = 64 * 1024
FLUSH_S = 1.0


class RecorderRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[recorder]`."""

    directory: str = ""
    """Where traces of live traffic are written, `<id>.jsonl` of each gateway process. Empty: nowhere."""
    max_bytes: Annotated[int, Meta(ge=1)] = 1 << 30
    """Recording stops there."""


class TraceRecorder:
    """Owns the file from `open` to `close`."""

    def __init__(self, rules: RecorderRules, name: str, clock: Clock) -> None:
        self._left = rules.max_bytes
        self._clock = clock
        self._began = clock.now()
        self._salt = secrets.token_bytes(16)
        self._lines: list[bytes] = []
        self._pending = 0
        # The file is the recorder's own, for this process's life; it is closed by `close`.
        self._file: BinaryIO | None = (Path(rules.directory) / f"{name}.jsonl").open("ab")

    @property
    def is_on(self) -> bool:
        """True while there is room."""
        return self._file is not None and self._left > 0

    def record(self, work: Work, *, at: float) -> None:
        """Note a request that arrived at `at` [clock seconds] and has ended."""
        chain, prompt = next(iter(work.chains.values()), None), work.prompt
        if not self.is_on or chain is None:
            return
        pages = chain.events[: len(prompt.token_ids) // chain.page_tokens]
        row: dict[str, Any] = {
            "timestamp": round(1000 * (at - self._began)),
            "input_length": len(prompt.token_ids),
            "output_length": len(work.output),
            "hash_ids": [self._mask(page.to_bytes(8, "little", signed=True)) for page in pages],
            "block_size": chain.page_tokens,
        }
        if prompt.session:
            row["session"] = self._mask(session_of(prompt).encode())
        line = msgspec.json.encode(row) + b"\n"
        self._left -= len(line)
        self._lines.append(line)
        self._pending += len(line)
        if self._pending >= FLUSH_BYTES:
            self.flush()

    async def follow(self) -> None:
        """Write what is pending, again and again; an owned task."""
        while True:
            await asyncio.sleep(FLUSH_S)
            self.flush()

    def flush(self) -> None:
        """Write what is pending."""
        if self._file is not None and self._lines:
            self._file.write(b"".join(self._lines))
            self._file.flush()
        self._lines, self._pending = [], 0

    def close(self) -> None:
        """Write what is pending and close the file. Idempotent."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _mask(self, value: bytes) -> int:
        # 53 bits: every JSON reader keeps them exactly.
        return int.from_bytes(hashlib.blake2b(value, digest_size=8, key=self._salt).digest(), "little") >> 11
