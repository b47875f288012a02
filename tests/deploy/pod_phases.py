"""How long pods were in each phase of their start, from what Kubernetes wrote down (whole seconds)."""

from datetime import datetime

PHASES = {"scheduled": "PodScheduled", "model prepared": "Initialized", "ready": "Ready"}


def phases(pods):
    """Phase -> seconds since the pod was created, of the slowest pod."""
    found = {}
    for pod in pods:
        begun = moment(pod["metadata"]["creationTimestamp"])
        at = {c["type"]: moment(c["lastTransitionTime"]) for c in pod["status"]["conditions"] if c["status"] == "True"}
        for name, condition in PHASES.items():
            found[name] = max(found.get(name, 0.0), (at[condition] - begun).total_seconds())
    return found


def moment(text):
    return datetime.fromisoformat(text)
