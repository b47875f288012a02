"""Becomes a service that cannot outlive its launcher: ties itself to the parent, then executes the real program.

Run as ``python -m deploy.local.child PARENT_PID MODULE [ARGS...]``. Linux only; elsewhere it just executes.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask the kernel for SIGTERM at the parent's death, then replace this process."""
    parent = int(sys.argv[1])
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the launcher ended before this process could start")
    os.execv(sys.executable, [sys.executable, "-m", *sys.argv[2:]])


if __name__ == "__main__":
    main()
