"""The socket where clients connect, handed from the supervisor of one gateway to that of the next on the same host.

Whoever holds it shares its queue, so a gateway can follow another and no connection is lost. Offered on an abstract Unix
socket to processes of the same user only.
"""

import contextlib
import hashlib
import os
import socket
import struct
import threading
from collections.abc import Sequence

from gateway.http.server import bind

BACKLOG = 2048
ANSWER_S = 5.0
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: see unix(7)


class SharedListener:
    """A listening socket that others may take as long as it is not closed."""

    def __init__(self, listener: socket.socket, name: str) -> None:
        self._listener = listener
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._door.bind(name)
        self._door.listen()
        self._thread = threading.Thread(target=self._offer, name="offers the listener", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return the descriptor, to be inherited."""
        return self._listener.fileno()

    def close(self) -> None:
        """Stop offering it and let go of it; who took it keeps it."""
        with contextlib.suppress(OSError):  # nobody ever connected: shutdown is only there to wake the thread
            self._door.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._door.close()
        self._listener.close()

    def _offer(self) -> None:
        while True:
            try:
                taker, _ = self._door.accept()
            except OSError:  # closed
                return
            with taker, contextlib.suppress(OSError):
                if _is_ours(taker):
                    socket.send_fds(taker, [b"."], [self._listener.fileno()])


def take_listener(place: str, own: str, others: Sequence[str], host: str, port: int) -> SharedListener:
    """Return the listener of another gateway of this `place` (one cluster on one host), else a new one on host:port.

    `own` and `others` are names of gateways. Raises ConfigError if the port is taken by a stranger.
    """
    for other in others:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.settimeout(ANSWER_S)
            door.connect(_name(place, other))
            if _is_ours(door):
                _, (descriptor, *_), _, _ = socket.recv_fds(door, 1, 1)
                return SharedListener(socket.socket(fileno=descriptor), _name(place, own))
    listener = bind(host, port, reuse_port=False)
    listener.listen(BACKLOG)
    return SharedListener(listener, _name(place, own))


def _name(place: str, gateway: str) -> str:
    return f"\0tandem-{hashlib.sha256(place.encode()).hexdigest()[:32]}-{gateway}"


def _is_ours(peer: socket.socket) -> bool:
    found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(found)[1] == os.getuid()
