"""What the workers of `benchmarks.gateway_peers` say, and how often.

Every token has exactly one space, and no router's JSON has one outside of the text: so the client counts tokens,
however many of them an event holds.
"""

STEP_S = 0.010
LARGE = 256
LARGE_STEP_S = 0.100
"""Of more than `LARGE` streams: no router here can pass on 100,000 tokens a second."""
TEXT = "The weather in Paris is sunny, the answer is yes. " * 8
WORDS = [word + " " for word in TEXT.split()]


def step_s(num_streams: int) -> float:
    """Return how long an engine takes for a step with so many streams."""
    return STEP_S if num_streams <= LARGE else LARGE_STEP_S
