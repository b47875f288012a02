"""One controller per cluster: a lock file that names its holder, and a fence that grows with every holder.

The kernel drops the lock when the holder dies; the fence makes the old holder's late orders worthless.
"""

import fcntl
import os
from pathlib import Path
from typing import TextIO

from core.errors import ConfigError

LOCK_NAME = "controller-fence"
"""Stays behind: the next holder needs a larger fence than any before."""


class FileLock:
    """Held from `acquire` to `release`. The file holds the last fence given out."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LOCK_NAME
        self._file: TextIO | None = None

    def acquire(self) -> int:
        """Take the lock and return a fence larger than any before; raises ConfigError if another controller holds it."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise ConfigError(
                f"another controller holds {self._path}; stop it, or run this one with controller.advisory = true"
            ) from error
        file.seek(0)
        last = file.read().strip()
        fence = (int(last) if last.isdigit() else 0) + 1
        file.seek(0)
        file.truncate()
        file.write(f"{fence}\n")
        file.flush()
        os.fsync(file.fileno())
        self._file = file
        return fence

    def release(self) -> None:
        """Let another take over."""
        if self._file is not None:
            self._file.close()
            self._file = None
