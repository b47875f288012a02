"""`python -m deploy.controller --config FILE [--set a.b=c ...]`: the controller, until it is told to leave."""

import logging
import sys

from core import log
from core.config import dump
from core.process import run_process
from deploy.controller import app, kubernetes
from deploy.controller.config import ControllerConfig

_LOG = logging.getLogger(__name__)
LEAVE_S = 5.0
"""Nothing waits for a controller: workers that leave go on leaving."""


_SERVE = {"k8s": kubernetes.serve}
"""Places whose lock is not a file."""


def configure(config: ControllerConfig) -> None:
    """Set up logging, and log the resolved configuration once."""
    log.configure(config.controller.id, config.controller.log_level)
    _LOG.info("configuration:\n%s", dump(config))


def main() -> int:
    """Run the process and return its exit code."""
    return run_process(
        ControllerConfig,
        sys.argv[1:],
        prog="controller",
        configure=configure,
        budget_s=lambda _: LEAVE_S,
        serve=lambda config, departure: _SERVE.get(config.controller.place, app.serve)(config, departure),
    )


if __name__ == "__main__":
    sys.exit(main())
