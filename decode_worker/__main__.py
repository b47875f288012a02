"""`python -m decode_worker --config FILE [--set a.b=c ...]`: one decode worker process, until it is told to leave."""

import logging
import sys

from core import log
from core.config import dump
from core.process import run_process
from decode_worker.app import serve
from decode_worker.config import DecodeWorkerConfig

_LOG = logging.getLogger(__name__)


def configure(config: DecodeWorkerConfig) -> None:
    """Set up logging, and log the resolved configuration once."""
    log.configure(config.worker.id, config.worker.log_level)
    _LOG.info("configuration:\n%s", dump(config))


def main() -> int:
    """Run the process and return its exit code."""
    return run_process(
        DecodeWorkerConfig,
        sys.argv[1:],
        prog="decode_worker",
        configure=configure,
        budget_s=lambda config: config.drain.budget_s,
        serve=serve,
    )


if __name__ == "__main__":
    sys.exit(main())
