"""Picks the actuator of a place. Imports a place's libraries only when it is asked for."""

from pathlib import Path

from core.errors import ConfigError
from deploy.actuators.api import Actuator
from deploy.actuators.local import LocalActuator

REMOVE_TIMEOUT_S = 3600.0
"""Bounds one removal; the place's own drain budget ends it long before."""


def actuator_for(place: str, target: str) -> Actuator:
    """Return the actuator of `place` for the cluster that `target` names; raises ConfigError for an unknown place."""
    match place:
        case "local":
            return LocalActuator(Path(target), remove_timeout_s=REMOVE_TIMEOUT_S)
        case "ray":
            raise ConfigError("on Ray the cluster's own actor sizes the pools; use: tandem up --on ray --autoscale")
        case _:
            raise ConfigError(f"there is no place {place!r}; use local, ray or k8s")
