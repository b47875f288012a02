"""`python -m gateway --config FILE [--set a.b=c ...]`: one gateway process, until it is told to leave."""

import logging
import sys

from core import log
from core.config import dump
from core.process import run_process
from gateway.app import serve
from gateway.config import GatewayConfig

try:
    from uvloop import new_event_loop
except ImportError:  # no wheel for this platform: asyncio's own loop serves too, with fewer tokens per second
    from asyncio import new_event_loop

_LOG = logging.getLogger(__name__)


def configure(config: GatewayConfig) -> None:
    """Set up logging, and log the resolved configuration once."""
    log.configure(config.id, config.log_level)
    _LOG.info("configuration:\n%s", dump(config))


def main() -> int:
    """Run the process and return its exit code."""
    return run_process(
        GatewayConfig,
        sys.argv[1:],
        prog="gateway",
        configure=configure,
        budget_s=lambda config: config.drain.budget_s,
        serve=serve,
        loop_factory=new_event_loop,
    )


if __name__ == "__main__":
    sys.exit(main())
