"""An actuator without processes: the controller's tests and the contract suite run on it."""

from deploy.actuators.api import FenceGate, Instance
from deploy.cluster_description import ClusterDescription


class FakeActuator:
    """Workers appear `ready` at once, or `starting` until `settle` if `is_slow`."""

    def __init__(self, description: ClusterDescription, *, is_slow: bool = False) -> None:
        self._description = description
        self._is_slow = is_slow
        self._gate = FenceGate()
        self._instances: dict[str, Instance] = {}
        self.removed: list[str] = []
        """Ids in the order in which they were removed."""

    async def list(self) -> tuple[Instance, ...]:
        return tuple(self._instances[key] for key in sorted(self._instances))

    async def ensure(self, role: str, count: int, *, fence: int) -> None:
        self._description.pool(role)
        self._gate.check(fence)
        number = 1
        while sum(1 for i in self._instances.values() if i.role == role) < count:
            worker_id = f"{role}-{number}"
            if worker_id not in self._instances:
                state = "starting" if self._is_slow else "ready"
                self._instances[worker_id] = Instance(id=worker_id, role=role, state=state)
            number += 1

    async def remove(self, worker_id: str, *, fence: int) -> None:
        self._gate.check(fence)
        if self._instances.pop(worker_id, None) is not None:
            self.removed.append(worker_id)

    def describe(self) -> dict[str, object]:
        return {"place": "fake", "cluster": self._description.name}

    def settle(self) -> None:
        """Let every starting worker become ready."""
        for key, found in self._instances.items():
            self._instances[key] = Instance(id=found.id, role=found.role, state="ready")
