"""What one attempt costs the workers it was sent to, counted once and given back exactly once.

A `Dispatch` is the receipt: it adds to the fleet's own-work figures at creation and takes off at first token and
end. Holds no connection and decides nothing.
"""

import numpy as np

from gateway.directory import RECENT_HALF_LIFE_S, Directory, Member


class Dispatch:
    """One attempt's work at its prefill worker (None: the decode worker computes the prompt) and decode worker."""

    def __init__(
        self,
        directory: Directory,
        *,
        prefill: Member | None,
        decode: Member,
        tokens: int,
        seconds: float,
        context: int = 0,
    ) -> None:
        self._directory = directory
        self._decode = decode
        self._tokens = tokens
        self._context = max(tokens, context)
        self._computing: Member | None = None
        self._since = 0.0
        self._open = True
        self.computed_at: float | None = None
        """When the prompt was done."""
        if decode.alive:
            directory.fleet.own_requests[decode.slot] += 1
        directory.dispatched(decode)
        self.place(prefill, seconds=seconds)

    def place(self, prefill: Member | None, *, seconds: float) -> None:
        """The prompt is computed at `prefill`, or at the decode worker; earlier placement is given back."""
        if self._computing is not None and self._computing is not self._decode:
            # A refusal says nothing of its health; as a breaker's probe it must not stay out for ever.
            self._directory.undecided(self._computing)
        self._give_back()
        self._since = self._directory.now()
        target = prefill or self._decode
        if target.alive:
            self._computing = target
            queue_prompt(self._directory, target, self, self._tokens, seconds)
        if prefill is not None:
            self._directory.dispatched(prefill)

    def computed(self) -> float:
        """The prompt is done: its tokens wait nowhere any more. Return the seconds that took; 0: known before."""
        if self._computing is None:
            return 0.0
        if self._computing is not self._decode:
            self._directory.succeeded(self._computing)
        self.computed_at = self._directory.now()
        self._learn(self._computing, self.computed_at)
        self._give_back()
        return self.computed_at - self._since

    def close(self) -> None:
        """The attempt is over, however it ended. Idempotent."""
        if not self._open:
            return
        self._open = False
        if self._computing is not None and self._computing is not self._decode:
            self._directory.undecided(self._computing)
        self._give_back()
        if self._decode.alive:
            self._directory.fleet.own_requests[self._decode.slot] -= 1
        self._directory.undecided(self._decode)

    def _learn(self, member: Member, now: float) -> None:
        """Its time is known where the worker was ours alone: it began when it was sent or when the one before was done."""
        fleet = self._directory.fleet
        if member.alive and not fleet.foreign_tokens[member.slot]:
            took_s = now - max(self._since, member.computed_at)
            self._directory.costs.observe(fleet, member.slot, self._tokens, self._context, took_s)
        member.computed_at = now

    def _give_back(self) -> None:
        target, self._computing = self._computing, None
        if target is not None:
            unqueue_prompt(self._directory, target, self, self._tokens)


def queue_prompt(directory: Directory, member: Member, receipt: object, tokens: float, seconds: float) -> None:
    """A prompt of ours waits there from now on; `seconds` are predicted."""
    fleet, slot = directory.fleet, member.slot
    if not member.prompts:
        fleet.head_s[slot], fleet.head_since[slot] = seconds, directory.now()
    member.prompts[receipt] = seconds
    fleet.own_prompts[slot] += 1
    fleet.own_tokens[slot] += tokens
    fleet.own_s[slot] += seconds
    fleet.recent_s[slot] += seconds


def unqueue_prompt(directory: Directory, member: Member, receipt: object, tokens: float) -> None:
    """It waits there no more: computed, or placed elsewhere."""
    fleet, slot = directory.fleet, member.slot
    seconds = member.prompts.pop(receipt)
    if not member.alive:
        return
    fleet.own_prompts[slot] -= 1
    fleet.own_tokens[slot] -= tokens
    # Sums of floats drift; an empty queue is exactly empty.
    fleet.own_s[slot] = fleet.own_s[slot] - seconds if member.prompts else 0.0
    fleet.head_s[slot], fleet.head_since[slot] = next(iter(member.prompts.values()), 0.0), directory.now()


def decay_recent(directory: Directory, elapsed_s: float) -> None:
    """Let the long-term load of all workers fade by `elapsed_s` seconds."""
    directory.fleet.recent_s *= np.exp2(-elapsed_s / RECENT_HALF_LIFE_S)
