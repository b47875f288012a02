"""What `ray up` itself would say to a description. Loaded by `factory` alone: needs Ray."""

from collections.abc import Mapping
from typing import Any

from ray.autoscaler._private.util import prepare_config, validate_config  # pyright: ignore[reportPrivateUsage] - the command's own checks have no public door

from core.errors import ConfigError


def check_ray_up(tree: Mapping[str, Any]) -> None:
    """Raise ConfigError with the first complaint; Ray's own are a schema's, a bare TypeError or a KeyError."""
    try:
        validate_config(prepare_config(dict(tree)))
    except KeyError as error:
        raise ConfigError(f"the section {error.args[0]!r} is missing") from error
    except Exception as error:
        reason = str(getattr(error, "message", "") or error).strip().splitlines()
        raise ConfigError(f"ray up refuses it: {reason[0] if reason else type(error).__name__}") from error
