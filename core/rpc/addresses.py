"""Addresses of members: `host:port` is itself; `dns:name:port` stands for every address that the name has just now."""

import asyncio
import logging
import socket
from collections.abc import Sequence

logger = logging.getLogger(__name__)

DNS = "dns:"
RESOLVE_TIMEOUT_S = 2.0


def is_name(address: str) -> bool:
    """True for an address that has to be looked up, again and again."""
    return address.startswith(DNS)


async def look_up(address: str) -> tuple[str, ...]:
    """Return `host:port` of everything behind a `dns:` address; empty, and a line in the log, if it has no answer."""
    name, _, port = address.removeprefix(DNS).rpartition(":")
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):
            found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError) as error:
        logger.debug("%s has no address: %s", name, error)
        return ()
    hosts = dict.fromkeys(str(entry[4][0]) for entry in found)
    return tuple(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts)


async def expand(addresses: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses with every name replaced by what it stands for, each once."""
    found: dict[str, None] = {}
    for address in addresses:
        found.update(dict.fromkeys(await look_up(address) if is_name(address) else (address,)))
    return tuple(found)
