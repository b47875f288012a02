"""Finding the NIXL wheel and checking that it is one we know, before anything depends on it."""

import importlib
import logging
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from core.errors import ConfigError

WHEELS = ("nixl-cu12", "nixl-cu13", "nixl-rocm")
"""Any of them works without a GPU."""
OLDEST, UNKNOWN = (1, 5), (2, 0)
IDLE_WAIT_US = 20_000
"""How long a progress thread of the library sleeps if no event wakes it."""
_NAMES = ("nixl_agent", "nixl_agent_config", "nixl_thread_sync_t")
_METHODS = (
    "add_remote_agent",
    "check_xfer_state",
    "create_backend",
    "get_agent_metadata",
    "get_xfer_descs",
    "initialize_xfer",
    "make_prepped_xfer",
    "prep_xfer_dlist",
    "register_memory",
    "remove_remote_agent",
    "transfer",
)
_ERRORS = (
    "nixlBackendError",
    "nixlCancelledError",
    "nixlInvalidParamError",
    "nixlMismatchError",
    "nixlNotAllowedError",
    "nixlNotFoundError",
    "nixlNotPostedError",
    "nixlNotSupportedError",
    "nixlRemoteDisconnectError",
    "nixlRepostActiveError",
    "nixlUnknownError",
)
"""They have no base class of their own."""
logger = logging.getLogger(__name__)
_INSTALL = "install it with: pip install 'tandem-serving[nixl]'"


def find_version() -> tuple[str, str]:
    """Return (wheel, version) of the installed NIXL without loading it; raises ConfigError that says what to install."""
    for wheel in WHEELS:
        try:
            found = version(wheel)
        except PackageNotFoundError:
            continue
        if not OLDEST <= _numbers(found) < UNKNOWN:
            raise ConfigError(f"{wheel} {found} is not supported, 1.5 or a later 1.x is; {_INSTALL}")
        return wheel, found
    raise ConfigError(f"the nixl transport needs the NIXL wheel; {_INSTALL}")


class Nixl:
    """The loaded library. Raises ConfigError if it cannot be loaded or lacks what we call."""

    def __init__(self) -> None:
        wheel, self.version = find_version()
        try:
            self.api: ModuleType = importlib.import_module(wheel.replace("-", "_"))
            bindings: ModuleType = importlib.import_module(f"{self.api.__name__}._bindings")
        except (ImportError, OSError) as error:
            raise ConfigError(f"{wheel} {self.version} cannot be loaded: {error}") from error
        missing = [name for name in _NAMES if not hasattr(self.api, name)]
        missing += [name for name in _METHODS if not missing and not hasattr(self.api.nixl_agent, name)]
        missing += [name for name in _ERRORS if not hasattr(bindings, name)]
        if missing:
            raise ConfigError(f"{wheel} {self.version} lacks {missing[0]}; {_INSTALL}")
        self.errors: tuple[type[Exception], ...] = tuple(getattr(bindings, name) for name in _ERRORS)
        self.over: tuple[type[Exception], ...] = (bindings.nixlRemoteDisconnectError, bindings.nixlCancelledError)
        """Those that prove a posted transfer over; RDMA needs a pause after the first."""
        wrapper: Any = importlib.import_module(self.api.nixl_agent.__module__)
        binding = getattr(wrapper, "nixlBind", None)
        if binding is None or not hasattr(bindings.nixlAgentConfig, "pthrDelay"):
            logger.warning(
                "%s %s keeps a core busy for each agent that serves: its pause cannot be set", wheel, self.version
            )
        elif not isinstance(binding, _PatientBinding):
            wrapper.nixlBind = _PatientBinding(binding)
        # The library configures Python's logging when it is imported and tells every agent and backend at INFO.
        logging.getLogger("nixl").setLevel(logging.WARNING)

    def agent(self, name: str, *, serves: bool) -> Any:
        """Make an agent without backends. STRICT: several threads of ours use it. No listener: it would bind everywhere.

        One that serves answers from a thread of the library's. One that reads needs none: whoever waits looks, and that moves
        the bytes with a third of the CPU time.
        """
        config = self.api.nixl_agent_config(
            enable_prog_thread=serves,
            enable_listen_thread=False,
            backends=[],
            sync_mode=self.api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        return self.api.nixl_agent(name, config)


class _PatientBinding:
    """The library's binding, with progress threads that sleep between events: left alone, each keeps a whole core busy.

    The Python wrapper of the library sets that pause to zero and offers no argument for it.
    """

    def __init__(self, binding: Any) -> None:
        self._binding = binding

    def __getattr__(self, name: str) -> Any:
        return getattr(self._binding, name)

    def nixlAgent(self, name: str, config: Any) -> Any:  # noqa: N802 - the library's name
        config.pthrDelay = IDLE_WAIT_US
        return self._binding.nixlAgent(name, config)


def _numbers(text: str) -> tuple[int, int]:
    major, minor, *_ = (*text.split("."), "0")
    digits = (major, minor) if major.isdigit() and minor.isdigit() else ("0", "0")
    return int(digits[0]), int(digits[1])
