"""A DNS server for the lab: names of Services, from the API server, as A records. `python -m deploy.lab.names`.

Debian has no CoreDNS. Answers `NAME.NAMESPACE.svc.cluster.local`: the addresses of a headless Service's pods, else the
Service's own. Everything else does not exist.
"""

import argparse
import contextlib
import json
import socket
import ssl
import struct
import time
import urllib.request
from pathlib import Path
from typing import Any, cast

ZONE = "svc.cluster.local"
KEEP_S = 0.5
TTL_S = 1
NAME_ERROR, NO_ERROR = 3, 0
TYPE_A = 1


class Names:
    """What the API server knows, at most `KEEP_S` old."""

    def __init__(self, kubeconfig: str) -> None:
        access = json.loads(Path(kubeconfig).read_text())
        self._server = str(access["clusters"][0]["cluster"]["server"])
        self._headers = {"Authorization": f"Bearer {access['users'][0]['user']['token']}"}
        self._context = ssl.create_default_context()
        # The lab's own server, made a minute ago; its certificate is nobody's.
        self._context.check_hostname = False
        self._context.verify_mode = ssl.CERT_NONE
        self._known: dict[str, list[str]] = {}
        self._read_at = 0.0

    def addresses(self, name: str) -> list[str] | None:
        """Return the addresses of a name; None if it does not exist."""
        if time.monotonic() - self._read_at > KEEP_S:
            with contextlib.suppress(OSError):
                self._known = records([*self._list("services", "Service"), *self._list("endpoints", "Endpoints")])
            self._read_at = time.monotonic()
        return self._known.get(name)

    def _list(self, what: str, kind: str) -> list[Any]:
        asked = urllib.request.Request(f"{self._server}/api/v1/{what}", headers=self._headers)  # noqa: S310 - the lab's own
        with urllib.request.urlopen(asked, timeout=5.0, context=self._context) as answered:  # noqa: S310 - as above
            items = cast("list[Any]", json.load(answered)["items"])
        # A list names the kind of its items once, for all of them.
        return [{**item, "kind": kind} for item in items]


def records(items: list[Any]) -> dict[str, list[str]]:
    """Return name -> addresses of Services and their Endpoints; pure."""
    found: dict[str, list[str]] = {}
    for item in items:
        name = f"{item['metadata']['name']}.{item['metadata']['namespace']}.{ZONE}"
        if item["kind"] == "Service" and item["spec"].get("clusterIP") != "None":
            found[name] = [item["spec"]["clusterIP"]]
        elif item["kind"] == "Endpoints" and name not in found:
            found[name] = [
                a["ip"]
                for subset in item.get("subsets", [])
                for a in [*subset.get("addresses", []), *subset.get("notReadyAddresses", [])]
            ]
    return found


def answer(query: bytes, names: Names) -> bytes:
    """Return the reply to one query; raises struct.error or IndexError for garbage."""
    labels, at = [], 12
    while (length := query[at]) != 0:
        labels.append(query[at + 1 : at + 1 + length].decode().lower())
        at += 1 + length
    end = at + 5
    (kind,) = struct.unpack(">H", query[at + 1 : at + 3])
    found = names.addresses(".".join(labels))
    hosts = (found or []) if kind == TYPE_A else []
    code = NAME_ERROR if found is None else NO_ERROR
    head = query[:2] + struct.pack(">HHHHH", 0x8580 | code, 1, len(hosts), 0, 0)
    rows = b"".join(struct.pack(">HHHIH", 0xC00C, TYPE_A, 1, TTL_S, 4) + socket.inet_aton(host) for host in hosts)
    return head + query[12:end] + rows


def main() -> None:
    """Serve until ended."""
    parser = argparse.ArgumentParser(description="DNS for the lab's Services.")
    parser.add_argument("--kubeconfig", required=True)
    parser.add_argument("--host", required=True)
    options = parser.parse_args()
    names = Names(options.kubeconfig)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((options.host, 53))
        while True:
            query, peer = server.recvfrom(512)
            try:
                server.sendto(answer(query, names), peer)
            except (struct.error, IndexError, UnicodeDecodeError):
                continue


if __name__ == "__main__":
    main()
