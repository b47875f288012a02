"""What the autoscaler remembers of one pool: recent recommendations and the change under way. Frozen, pure."""

import msgspec

from deploy.autoscale.signals import PoolCount


class PoolMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Recommendations (monotonic seconds, workers), oldest first."""

    seen: tuple[tuple[float, int], ...] = ()
    since: float = 0.0
    """When the controller began to look; nothing shrinks before one whole down window was seen."""
    changed_at: float = 0.0
    changed_to: int = 0
    direction: int = 0
    """Of the change under way: 1, -1, or 0 for none."""

    def with_recommendation(self, now: float, workers: int, keep_s: float) -> "PoolMemory":
        """Add one recommendation and forget those older than `keep_s`."""
        kept = tuple(entry for entry in self.seen if entry[0] > now - keep_s)
        return msgspec.structs.replace(self, seen=(*kept, (now, workers)))

    def lowest(self, now: float, window_s: float) -> int:
        """Return the lowest recommendation of the window; the newest is always inside."""
        return min(workers for at, workers in self.seen if at >= now - window_s)

    def highest(self, now: float, window_s: float) -> int:
        """Return the highest recommendation of the window."""
        return max(workers for at, workers in self.seen if at >= now - window_s)

    def is_settled(self, count: PoolCount, now: float, settle_s: float) -> bool:
        """Tell whether the last change is complete, or was given up."""
        if self.direction == 0 or now - self.changed_at > settle_s:
            return True
        if self.direction > 0:
            return count.starting == 0 and count.ready >= self.changed_to
        return count.draining == 0 and count.ready <= self.changed_to

    def with_change(self, now: float, count: PoolCount, target: int) -> "PoolMemory":
        """Remember that the pool was told to go to `target`."""
        direction = (target > count.want) - (target < count.want)
        return msgspec.structs.replace(self, changed_at=now, changed_to=target, direction=direction)
