"""A simulated worker of ours that says the same English as `peers_http_worker`, and one token at once.

Run by `benchmarks.gateway_peers`: `python -m benchmarks.peers_grpc_worker --set text_of=DIRECTORY ...`, the directory
being the gateway's model; the other settings are `tests.fakes.sim_worker`'s.
"""

import asyncio
import datetime as dt
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers_text import TEXT, step_s
from core.stream import FromGateway, Submit
from gateway.text.tokenizer import load_tokenizer
from tests.fakes import sim_decode, sim_worker

TEXT_OF = "text_of"
"""Setting: whose tokenizer spells the text."""


def now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


class PromptDecode(sim_decode.SimDecode):
    """Answers a request for one token without waiting for the step."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self._due: list[sim_decode.Session] = []

    def _command(self, session: sim_decode.Session, frame: FromGateway) -> None:
        super()._command(session, frame)
        if (
            isinstance(frame, Submit)
            and frame.request.stop.max_tokens == 1
            and not any(due is session for due in self._due)
        ):
            # All that come together are one step, as in an engine.
            self._due.append(session)
            asyncio.get_running_loop().call_soon(self._step_due)

    def _step_due(self) -> None:
        due, self._due = self._due, []
        for session in due:
            self._step(session)

    def _step(self, session: sim_decode.Session) -> None:
        super()._step(session)
        self.step_s = step_s(self.running)


def main() -> None:
    """Replace the arithmetic tokens and serve."""
    at = next(at for at, word in enumerate(sys.argv) if word.startswith(f"{TEXT_OF}="))
    directory = Path(sys.argv[at].partition("=")[2])
    del sys.argv[at - 1 : at + 1]
    tokenizer = load_tokenizer(directory, now)
    tokens = [token for token in tokenizer.encode_prompt(TEXT) if tokenizer.decode([token]).count(" ") == 1]

    def english(prompt: Sequence[int], position: int) -> int:  # noqa: ARG001 - the signature of what it replaces
        return tokens[position % len(tokens)]

    sim_decode.sim_token = english
    sim_worker.SimDecode = PromptDecode
    sys.exit(sim_worker.run())


if __name__ == "__main__":
    main()
