"""What prompts and hand-overs cost, learned from what they took. Pure state; the caller measures.

A prompt of n tokens of which u are new is taken to need a + b*u + c*u*(n - u/2) seconds: fixed cost, linear layers,
attention. The three are fitted per kind of worker by recursive least squares on relative errors, so that short and
long prompts count alike.
"""

from dataclasses import dataclass

import numpy as np

from gateway.fleet import Fleet, Ints

MEMORY = 0.995
"""Weight of a measurement after each further one."""
ENOUGH = 8
"""Measurements of a kind before its fit is used."""
SETTLED = 128
EVERY = 8
"""From `SETTLED` on a measurement moves a fit little: it is told to routing after every few."""
PRIOR_S = (0.002, 5e-4, 1e-8)
SPREAD = 9.0
"""A guess, and its variance in multiples of itself; a handful of prompts outweighs it."""
NOISE = 0.05
"""Variance of a measurement's relative error, about."""
LEAST = 1e-3
"""Of the guess, that a coefficient keeps."""
FAR = 3.0
FARTHEST = 10.0
"""A measurement further than this factor from the fit counts as this far: a stall says nothing of the next prompt."""
LEARNING = 0.1
NEAR_S, FAR_S = 1e-9, 4e-9
"""Seconds a byte adds within and between domains until hand-overs were measured."""


@dataclass(slots=True)
class _Fit:
    """a, b, c in multiples of the prior, and the upper half of their covariance, by rows.

    Plain numbers, one by one: with three of them any array or list costs more than all of this, and there is one fit a
    prompt.
    """

    factors: tuple[float, float, float] = (1.0, 1.0, 1.0)
    spread: tuple[float, float, float, float, float, float] = (SPREAD, 0.0, 0.0, SPREAD, 0.0, SPREAD)
    count: int = 0

    def observe(self, tokens: float, context: float, measured: float) -> None:
        a, b, c = PRIOR_S[0], PRIOR_S[1] * tokens, PRIOR_S[2] * tokens * (context - tokens / 2)
        base, linear, square = self.factors
        predicted = max(a * base + b * linear + c * square, 1e-6)
        if self.count >= ENOUGH:
            measured = min(max(measured, predicted / FARTHEST), predicted * FARTHEST)
        # Relative to what is predicted: to what was measured, prompts that happened to be fast would count for more.
        # But a fit that is far off would then count its own errors for little and never come back.
        scale = min(max(predicted, measured / FAR), measured * FAR)
        a, b, c = a / scale, b / scale, c / scale
        # Of the symmetric matrix the upper half: what rounding makes unequal on two sides would grow for ever.
        aa, ab, ac, bb, bc, cc = self.spread
        at_a, at_b, at_c = aa * a + ab * b + ac * c, ab * a + bb * b + bc * c, ac * a + bc * b + cc * c
        weight = MEMORY * NOISE + (a * at_a + b * at_b + c * at_c)
        gain_a, gain_b, gain_c = at_a / weight, at_b / weight, at_c / weight
        missed = measured / scale - (a * base + b * linear + c * square)
        # Time does not fall with work: a coefficient below zero is noise, and would take the others along.
        self.factors = (
            max(base + gain_a * missed, LEAST),
            max(linear + gain_b * missed, LEAST),
            max(square + gain_c * missed, LEAST),
        )
        aa, ab, ac = (aa - gain_a * at_a) / MEMORY, (ab - gain_a * at_b) / MEMORY, (ac - gain_a * at_c) / MEMORY
        bb, bc, cc = (bb - gain_b * at_b) / MEMORY, (bc - gain_b * at_c) / MEMORY, (cc - gain_c * at_c) / MEMORY
        # With nothing new to learn it would grow without bound, and the next surprise be believed blindly.
        bound = min(1.0, 3 * SPREAD / max(aa + bb + cc, 1e-12))
        self.spread = (aa * bound, ab * bound, ac * bound, bb * bound, bc * bound, cc * bound)
        self.count += 1

    @property
    def seconds(self) -> tuple[float, float, float]:
        """a, b, c in seconds."""
        a, b, c = self.factors
        return a * PRIOR_S[0], b * PRIOR_S[1], c * PRIOR_S[2]


class PrefillCosts:
    """The fits of all kinds; writes what it learned into the fleet's arrays."""

    def __init__(self) -> None:
        self._fits: dict[int, _Fit] = {}

    def observe(self, fleet: Fleet, slot: int, tokens: int, context: int, seconds: float) -> None:
        """A worker computed a prompt of `context` tokens, `tokens` of them anew, in `seconds`."""
        if seconds <= 0:
            return
        kind = int(fleet.kind[slot])
        fit = self._fits.setdefault(kind, _Fit())
        fit.observe(tokens, context, seconds)
        if fit.count >= ENOUGH and (fit.count < SETTLED or fit.count % EVERY == 0):
            self._publish(fleet, np.flatnonzero(fleet.used & (fleet.kind == kind)), fit)

    def describe(self, fleet: Fleet, slot: int) -> None:
        """A new worker costs what its kind does."""
        fit = self._fits.get(int(fleet.kind[slot]))
        if fit is not None and fit.count >= ENOUGH:
            self._publish(fleet, np.array([slot]), fit)

    def _publish(self, fleet: Fleet, slots: Ints, fit: _Fit) -> None:
        fleet.base_s[slots], fleet.token_s[slots], fleet.square_s[slots] = fit.seconds


@dataclass(slots=True)
class LinkCosts:
    """What moving KV costs: bytes a token has, and seconds a byte adds, within a domain and between two."""

    bytes_per_token: float = 0.0
    """0 until the first hand-over: moving is free."""
    near_s: float = NEAR_S
    far_s: float = FAR_S

    def observe(self, *, tokens: int, num_bytes: int, seconds: float, far: bool) -> None:
        """A hand-over moved `tokens` in `num_bytes`, and landed `seconds` after the prompt was computed.

        Most bytes fly while the prompt is computed; what counts is what they add behind it.
        """
        if tokens <= 0 or num_bytes <= 0:
            return
        weight = LEARNING if self.bytes_per_token else 1.0
        self.bytes_per_token += weight * (num_bytes / tokens - self.bytes_per_token)
        if seconds <= 0:
            return
        if far:
            self.far_s += LEARNING * (seconds / num_bytes - self.far_s)
        else:
            self.near_s += LEARNING * (seconds / num_bytes - self.near_s)
