"""One HTTP probe of a process's health listener, as an orchestrator would make it."""

import http.client

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
