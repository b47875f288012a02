"""HTTP probes of a process's health listener, as an orchestrator would make them."""

import http.client
import json
from typing import cast

PROBE_TIMEOUT_S = 2.0


def answers_ok(address: str, path: str) -> bool:
    """True if GET `path` at host:port answers 200 in time; any failure is False."""
    host, port = address.rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def routable(address: str) -> set[str]:
    """Return the ids of the workers that the gateway whose listener this is would choose now; empty if it is silent."""
    host, port = address.rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/statusz")
        told = cast("dict[str, list[dict[str, object]]]", json.loads(connection.getresponse().read()))
    except (OSError, http.client.HTTPException, json.JSONDecodeError):
        return set()
    finally:
        connection.close()
    return {str(worker["id"]) for worker in told.get("workers", []) if worker["routable"]}
