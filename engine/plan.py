"""The plan of one step: one bytes message from the scheduler to the runner, and the result that comes back.

Little-endian, fixed layout, decoded as views without copies; the same bytes go to every worker of one brain.
Zero rows are legal. Knows no torch.
"""

from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from core.errors import InvariantError
from core.request import MmItem, SamplingParams

I32 = npt.NDArray[np.int32]
U32 = npt.NDArray[np.uint32]
U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

MAGIC = 0x54504C31
_HEADER = np.dtype(
    [
        ("magic", "<u4"),
        ("step", "<u8"),
        ("rows", "<u4"),
        ("tokens", "<u4"),
        ("deltas", "<u4"),
        ("extra", "<u4"),
        ("draft_budget", "<i4"),
    ]
)
UNLIMITED = -1
"""Draft budget of a step that verifies all drafts there are."""


class RowInit(msgspec.Struct, frozen=True, kw_only=True):
    """State of a row that the runner needs before its first step (or first step after a change of owner)."""

    row: int
    generation: int
    sampling: SamplingParams
    token_ids: bytes
    """int32 LE: everything known of the sequence so far (prompt, then outputs): penalties count from it."""
    num_prompt_tokens: int
    min_tokens: int
    masked_until_min: tuple[int, ...]
    """End-of-text and stop ids, masked while fewer than `min_tokens` outputs exist."""
    next_token: int = -1
    """>= 0: the token whose KV the next decode step computes (a landed or resumed sequence)."""
    kv_limit: int = 1 << 30
    """Tokens that the row's KV may ever hold: no draft is verified beyond, and a row that is there computes nothing."""
    encoder_floor: int = 0
    """Replay: window rows below this position do not exist for the row."""
    known_tokens: int = 0
    """Replay: tokens known when the request was admitted, from whose end a keep length counts; 0: the row runs whole."""
    write_from: int = 0
    """Replay: tokens below this position write nothing paged."""
    images: tuple[MmItem, ...] = ()
    """Images of which at least one position is still to be computed, with their pixels."""
    grammar: str = ""
    """What the outputs must look like, those in `token_ids` included; empty: anything."""


class PlanExtra(msgspec.Struct, frozen=True, kw_only=True):
    """The rare part of a plan: rows to set up before the step."""

    inits: tuple[RowInit, ...] = ()


NO_EXTRA = PlanExtra()


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. b rows, t query tokens over all rows; row i computes positions seq_start[i] .. + q_len[i].

    A row whose `use_next[i]` is 1 takes its query tokens from the runner's own buffers (decode): the last token chosen,
    and with speculation the drafts behind it; otherwise its tokens are `tokens[q_start[i]:q_start[i+1]]`. `sample[i]` =
    1: choose a token after the row's last query token (with speculation: after each one up to the first rejected
    draft) and keep it as the next one. With speculation the lengths of decode rows are known to the runner alone: their
    `seq_start` is a lower bound, their query length an upper one.
    """

    step: int
    rows: I32  # [b]
    gens: U32  # [b]
    q_start: I32  # [b+1], q_start[0] = 0
    seq_start: I32  # [b] tokens already in KV
    use_next: U8  # [b]
    sample: U8  # [b]
    tokens: I32  # [t]; value ignored where use_next
    table_deltas: I32  # [d, 3]: (row, column, page) written to the page-table mirror before the step
    extra: PlanExtra = NO_EXTRA
    draft_budget: int = UNLIMITED
    """Drafts that the step may verify over all its rows; the runner takes the most promising ones."""

    def encode(self) -> bytes:
        """Return the wire form."""
        extra = _EXTRA_ENCODER.encode(self.extra)
        header = np.zeros(1, _HEADER)
        sizes = (len(self.rows), len(self.tokens), len(self.table_deltas), len(extra))
        header[0] = (MAGIC, self.step, *sizes, self.draft_budget)
        return b"".join(
            (
                header.tobytes(),
                self.rows.tobytes(),
                self.gens.tobytes(),
                self.q_start.tobytes(),
                self.seq_start.tobytes(),
                self.tokens.tobytes(),
                self.table_deltas.tobytes(),
                self.use_next.tobytes(),
                self.sample.tobytes(),
                extra,
            )
        )


_EXTRA_ENCODER = msgspec.msgpack.Encoder()
_EXTRA_DECODER = msgspec.msgpack.Decoder(PlanExtra)


def decode_plan(data: bytes) -> Plan:
    """Decode `Plan.encode()`; arrays are read-only views of `data`. Raises `InvariantError` on foreign bytes."""
    if len(data) < _HEADER.itemsize:
        raise InvariantError("plan message is shorter than its header")
    head = np.frombuffer(data, _HEADER, 1)[0]
    if int(head["magic"]) != MAGIC:
        raise InvariantError("plan message has a wrong magic number")
    b, t, d, extra = int(head["rows"]), int(head["tokens"]), int(head["deltas"]), int(head["extra"])
    if len(data) != _HEADER.itemsize + 4 * (b + b + b + 1 + b + t + 3 * d) + 2 * b + extra:
        raise InvariantError("plan message has a wrong length")
    at = _HEADER.itemsize

    def take(dtype: str, count: int) -> npt.NDArray[np.generic]:
        nonlocal at
        view = np.frombuffer(data, dtype, count, at)
        at += view.nbytes
        return view

    return Plan(
        step=int(head["step"]),
        rows=take("<i4", b).view(np.int32),
        gens=take("<u4", b).view(np.uint32),
        q_start=take("<i4", b + 1).view(np.int32),
        seq_start=take("<i4", b).view(np.int32),
        tokens=take("<i4", t).view(np.int32),
        table_deltas=take("<i4", 3 * d).view(np.int32).reshape(d, 3),
        use_next=take("u1", b).view(np.uint8),
        sample=take("u1", b).view(np.uint8),
        extra=_EXTRA_DECODER.decode(data[at:]),
        draft_budget=int(head["draft_budget"]),
    )


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step chose, up to `count` <= 1 + k tokens a row (k = 0 without speculation).

    A decode row's KV grew by `count` tokens too; that is how the scheduler learns lengths.
    """

    step: int
    tokens: I32  # [b, 1+k]; -1 where nothing was chosen
    count: I32  # [b] 0 for rows that did not sample
    logprobs: F32 | None = None  # [b, 1+k] of the chosen tokens; None if no row asked
    top_tokens: I32 | None = None  # [b, 1+k, K]; -1 padded
    top_logprobs: F32 | None = None  # [b, 1+k, K]
    forward_s: float = 0.0
    drafted: I32 | None = None  # [b] drafts that were verified; None without speculation
    confidences: F32 | None = None  # [b, k] of the drafts that the next step can verify; NaN where there are none
    refused: tuple[tuple[int, str], ...] = ()
    """(index into the rows, reason) of those whose grammar cannot be followed any further: their tokens mean nothing."""
    computed: int = -1
    """Query tokens really computed; -1: as many as planned."""


class StepHandle(Protocol):
    """A launched step."""

    def done(self) -> bool:
        """True once `Runner.collect` would not block."""
        ...


class Runner(Protocol):
    """Runs plans in the order of launch, on a thread (or device) of its own. One shipped fake: `scripted` tests use it.

    At most two steps are in flight. The runner touches tensors only; it never sees the tree, the pool or a request.
    """

    def launch(self, plan: bytes) -> StepHandle:
        """Queue a plan; returns at once. A step number that does not follow the last one raises InvariantError."""
        ...

    def collect(self, handle: StepHandle) -> StepResult:
        """Wait for a step and return its result; raises what the step raised."""
        ...

    def close(self) -> None:
        """Finish queued steps and end the thread."""
        ...
