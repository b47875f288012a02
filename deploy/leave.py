"""The goodbye of a process in a pod, run before its SIGTERM in an image without a shell: `python -m deploy.leave`.

Asks the process's own listener to drain and then waits, so that every gateway and proxy has noticed before the signal.
A module of its own: it starts in a fraction of the time that the whole command takes.
"""

import argparse
import http.client
import sys
import time
from collections.abc import Sequence

ASK_TIMEOUT_S = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 after the wait, 1 if nobody listens: then there is nothing to wait for."""
    parser = argparse.ArgumentParser(prog="python -m deploy.leave", description="Ask a process of this pod to drain.")
    parser.add_argument("--port", type=int, required=True, help="the process's metrics port")
    parser.add_argument("--wait-s", type=float, required=True)
    options = parser.parse_args(argv)
    try:
        connection = http.client.HTTPConnection("127.0.0.1", options.port, timeout=ASK_TIMEOUT_S)
        connection.request("POST", "/drain")
        connection.getresponse().read()
    except (OSError, http.client.HTTPException) as error:
        sys.stderr.write(f"nobody takes POST /drain at port {options.port}: {error}\n")
        return 1
    time.sleep(options.wait_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
