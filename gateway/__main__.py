"""`python -m gateway --config FILE [--set a.b=c ...]`: one gateway process, until it is told to leave."""

import logging
import sys

from core import log
from core.config import dump
from core.process import Departure, run_process
from gateway.app import serve
from gateway.config import GatewayConfig
from gateway.processes import ProcessGroup

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
    argv = sys.argv[1:]

    async def serve_all(config: GatewayConfig, departure: Departure) -> None:
        if config.processes > 1:
            await ProcessGroup(config, argv, departure).run()
        else:
            await serve(config, departure)

    return run_process(
        GatewayConfig,
        argv,
        prog="gateway",
        configure=configure,
        budget_s=lambda config: config.drain.budget_s,
        serve=serve_all,
        loop_factory=new_event_loop,
    )


if __name__ == "__main__":
    sys.exit(main())
