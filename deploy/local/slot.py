"""One process slot of a local cluster: its configuration file, its log, its process, and what it said when ready.

Knows how to start and to signal; when to do so is the launcher's decision.
"""

import asyncio
import enum
import json
import os
import signal
import sys
from pathlib import Path
from typing import Protocol, cast

from core.clock import Clock
from core.config import native_environment
from deploy.local.restart import History
from deploy.local.spec import SERVICE_MODULES, Revision

LOG_TAIL_LINES = 50


class SlotState(enum.StrEnum):
    """Of the process as the launcher sees it."""

    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"
    BACKOFF = "backoff"
    HELD = "held"
    GONE = "gone"


class Process(Protocol):
    """A child process: asyncio's own, or one on another host."""

    @property
    def pid(self) -> int:
        """Its pid on its host; 0 while it is not known."""
        ...

    @property
    def returncode(self) -> int | None:
        """Exit code, None while it runs."""
        ...

    async def wait(self) -> int:
        """Wait for its end and return the exit code."""
        ...

    def send_signal(self, signal: int, /) -> None:
        """Signal it; no error if it has ended."""
        ...


class Slot:
    """A named place for a process. Used by the launcher's event loop only."""

    def __init__(self, *, slot_id: str, role: str, revision: Revision, run_dir: Path, clock: Clock) -> None:
        self.id = slot_id
        self.role = role
        self.revision = revision
        self.state = SlotState.GONE
        self.history = History()
        self.asked = False
        self.started_at = 0.0
        self.process: Process | None = None
        self.facts: dict[str, object] = {}
        self.reason = ""
        self.inherits: tuple[int, ...] = ()
        """Descriptors that the process gets."""
        self._clock = clock
        self._config_path = run_dir / f"{slot_id}.toml"
        self._ready_path = run_dir / f"{slot_id}.json"
        self.log_path = run_dir / f"{slot_id}.log"

    @property
    def pid(self) -> int | None:
        """Pid of the running process."""
        return self.process.pid if self.process is not None and self.process.returncode is None else None

    async def start(self, config_toml: str, sets: list[str], threads: int) -> None:
        """Write the configuration and start the process with so many compute threads, tied to this one."""
        self._ready_path.unlink(missing_ok=True)
        self._config_path.write_text(config_toml)
        arguments = [str(os.getpid()), SERVICE_MODULES[self.role], "--config", str(self._config_path)]
        for value in sets:
            arguments += ["--set", value]
        with self.log_path.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "deploy.local.child",
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=native_environment(threads=threads),
                start_new_session=True,
                pass_fds=self.inherits,
            )
        self.started_at = self._clock.now()
        self.state = SlotState.STARTING
        self.asked = False

    def poll_ready(self) -> bool:
        """Read the ready file; True once this very process has written it."""
        if self.state is not SlotState.STARTING or self.process is None:
            return self.state is SlotState.READY
        try:
            facts = cast("dict[str, object]", json.loads(self._ready_path.read_text()))
        except (FileNotFoundError, json.JSONDecodeError):
            return False
        if facts.get("pid") != self.process.pid:
            return False
        self.facts = facts
        self.state = SlotState.READY
        return True

    def terminate(self) -> None:
        """Ask the process to drain and leave."""
        self.asked = True
        if self.state in {SlotState.STARTING, SlotState.READY}:
            self.state = SlotState.LEAVING
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process at once."""
        self.asked = True
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)

    def forget(self) -> None:
        """Remove what the slot left in the run directory, except its log."""
        self._ready_path.unlink(missing_ok=True)
        self._config_path.unlink(missing_ok=True)

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """Return the last lines of the log."""
        try:
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""

    def describe(self) -> dict[str, object]:
        """Return what `tandem status` shows."""
        return {
            "id": self.id,
            "role": self.role,
            "state": self.state.value,
            "revision": self.revision.number,
            "pid": self.pid,
            "restarts": len(self.history.restarts),
            "reason": self.reason,
            "log": str(self.log_path),
            **{k: v for k, v in self.facts.items() if k != "pid"},
        }


def first_sentence(log_tail: str) -> str:
    """Return the last plain line of a failed process: its one sentence of explanation."""
    plain = [line.strip() for line in log_tail.splitlines() if line.strip() and not line.lstrip().startswith("{")]
    return plain[-1] if plain else "it printed nothing"
