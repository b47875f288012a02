"""When a process that ended is started again: a pure decision from its history.

Exponential back-off 1 -> 600 s, forgotten after ten minutes of health, held after six restarts in an hour; a failed
preflight (exit code 3) is held at once, because the same start would fail the same way.
"""

from dataclasses import dataclass, replace

from core.lifecycle import EXIT_DRAINED, EXIT_PREFLIGHT

FIRST_DELAY_S = 1.0
MAX_DELAY_S = 600.0
HEALTHY_AFTER_S = 600.0
HOLD_AFTER_RESTARTS = 6
HOLD_WINDOW_S = 3600.0


@dataclass(frozen=True, slots=True)
class History:
    """Restarts of one process slot, newest last (monotonic seconds), and the last delay."""

    restarts: tuple[float, ...] = ()
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do now. `action` is ``restart`` (after `delay_s`), ``hold`` or ``remove``."""

    action: str
    delay_s: float
    reason: str
    history: History


def after_exit(history: History, *, exit_code: int, was_asked: bool, started_at: float, now: float) -> Verdict:
    """Decide what follows an exit. `was_asked`: the launcher had told the process to leave."""
    if was_asked:
        return Verdict("remove", 0.0, "asked to leave", history)
    if exit_code == EXIT_PREFLIGHT:
        return Verdict("hold", 0.0, "preflight failed; the same start would fail again", history)
    if now - started_at >= HEALTHY_AFTER_S:
        history = History()
    recent = tuple(t for t in history.restarts if now - t < HOLD_WINDOW_S)
    if len(recent) >= HOLD_AFTER_RESTARTS:
        return Verdict("hold", 0.0, f"{len(recent)} restarts within an hour", replace(history, restarts=recent))
    delay = min(MAX_DELAY_S, max(FIRST_DELAY_S, history.delay_s * 2))
    cause = "it left by itself" if exit_code == EXIT_DRAINED else f"exit code {exit_code}"
    return Verdict("restart", delay, cause, History((*recent, now), delay))
