"""The launcher's control socket: JSON lines over a Unix socket in the run directory.

One command per connection; the answer is any number of progress lines and one result line. Knows no process.
"""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from socket import AF_UNIX, SOCK_STREAM, socket
from typing import cast

from core.errors import ConfigError, TandemError

Reply = dict[str, object]
Progress = Callable[[str], None]
Handler = Callable[[Reply, Progress], Awaitable[Reply]]

SOCKET_NAME = "launcher.sock"
MAX_LINE = 1 << 20


class ControlServer:
    """Serves the control socket; a command's errors become an answer, never an end of the server."""

    def __init__(self, run_dir: Path, handler: Handler) -> None:
        self._path = run_dir / SOCKET_NAME
        self._handler = handler
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Bind the socket (mode 0600); a socket of a dead launcher is replaced."""
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, path=str(self._path), limit=MAX_LINE)
        os.chmod(self._path, 0o600)  # noqa: PTH101 - Path.chmod follows the same call; the socket exists already

    async def close(self) -> None:
        """Stop serving and remove the socket."""
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def progress(text: str) -> None:
            writer.write(json.dumps({"progress": text}).encode() + b"\n")

        try:
            line = await reader.readline()
            try:
                command = cast("Reply", json.loads(line))
                result = await self._handler(command, progress)
            except json.JSONDecodeError:
                result = {"error": "the command is not a JSON line"}
            except TandemError as error:
                result = {"error": error.message}
            writer.write(json.dumps(result).encode() + b"\n")
            await writer.drain()
        except (ConnectionError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()


def command(run_dir: Path, body: Reply, timeout_s: float | None = None) -> Iterator[Reply]:
    """Send one command and yield its lines; raises ConfigError if no launcher listens there."""
    with socket(AF_UNIX, SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(run_dir / SOCKET_NAME))
        except OSError as error:
            raise ConfigError(f"no running cluster found in {run_dir}; start one with: tandem up") from error
        connection.sendall(json.dumps(body).encode() + b"\n")
        with connection.makefile("rb") as lines:
            for line in lines:
                yield cast("Reply", json.loads(line))


def ask(run_dir: Path, body: Reply, on_progress: Progress, timeout_s: float | None = None) -> Reply:
    """Send one command, pass progress on, return the result; raises ConfigError with the launcher's sentence."""
    result: Reply = {"error": "the launcher closed the connection without an answer"}
    for reply in command(run_dir, body, timeout_s):
        if "progress" in reply:
            on_progress(str(reply["progress"]))
        else:
            result = reply
    if "error" in result:
        raise ConfigError(str(result["error"]))
    return result
