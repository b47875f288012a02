"""Loads what needs the package `ray`, which only this place does."""

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from core.errors import ConfigError


def ray_client() -> ModuleType:
    """Return `deploy.ray.client`; raises ConfigError if Ray is not installed."""
    return _load("deploy.ray.client")


def ray_up_check() -> Callable[[Mapping[str, Any]], None]:
    """Return the check of a description for `ray up`; raises ConfigError if Ray is not installed."""
    return _load("deploy.ray.ray_up").check_ray_up


def _load(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError("the package ray is not installed; use: pip install 'tandem-serving[ray]'") from error
