"""Where a prompt is computed: here or on a prefill worker. Pure; knows no engine and no network."""

import enum


class PrefillMode(enum.StrEnum):
    """Configured policy of a decode worker."""

    LOCAL = "local"
    """Always here: a single worker."""
    REMOTE = "remote"
    """On the prefill worker that the gateway names; here only if it names none."""
    AUTO = "auto"
    """Here when few tokens are uncached, else as REMOTE."""


def computes_here(
    mode: PrefillMode, *, has_target: bool, num_tokens: int, prefix_tokens: int, threshold_tokens: int
) -> bool:
    """Decide for one prompt. `prefix_tokens` are those that this worker's own tree holds (0 while unknown).

    Asked twice: before booking, when the prefix is not known, and after it. The answer can only turn from False to
    True, because a known prefix makes the uncached part smaller.
    """
    if mode is PrefillMode.LOCAL or not has_target:
        return True
    return mode is PrefillMode.AUTO and num_tokens - prefix_tokens <= threshold_tokens
