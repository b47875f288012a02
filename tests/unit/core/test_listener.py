"""The HTTP listener on its own thread, asked over real sockets."""

import asyncio
import http.client
import json
import socket
import threading
import time

import pytest

from core.errors import ConfigError
from core.listener import MAX_CONNECTIONS, Listener, Probes


class State:
    def __init__(self):
        self.live = self.ready = self.started = ""
        self.drained = 0

    def drain(self):
        self.drained += 1


def probes(state, **changes):
    parts = {
        "live": lambda: state.live,
        "ready": lambda: state.ready,
        "started": lambda: state.started,
        "metrics": lambda: b"tandem_free_pages 3\n",
        "status": lambda: {"state": "ready", "pages": 3},
        "drain": state.drain,
    }
    return Probes(**{**parts, **changes})


@pytest.fixture
def state():
    return State()


@pytest.fixture
def port(state):
    listener = Listener("127.0.0.1", 0, probes(state))
    yield listener.start()
    listener.close()


def ask(port, path, method="GET", headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, headers=headers or {})
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    return response.status, body, response.headers


@pytest.mark.parametrize(("path", "attribute"), [("/livez", "live"), ("/readyz", "ready"), ("/startz", "started")])
def test_probes_answer_200_or_503_with_what_is_missing(state, port, path, attribute):
    assert ask(port, path)[:2] == (200, "ok\n")
    setattr(state, attribute, "no gateway knows this worker")
    assert ask(port, path)[:2] == (503, "no gateway knows this worker\n")


def test_metrics_and_status_are_served(port):
    status, body, headers = ask(port, "/metrics")
    assert (status, body) == (200, "tandem_free_pages 3\n")
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    status, body, headers = ask(port, "/statusz?x=1")
    assert (status, json.loads(body)) == (200, {"state": "ready", "pages": 3})
    assert headers["Content-Type"] == "application/json"


def test_drain_is_a_post_of_this_host_and_of_no_browser(state, port):
    assert ask(port, "/drain")[0] == 404
    assert state.drained == 0
    assert ask(port, "/drain", "POST", {"Origin": "http://evil.example"})[0] == 403
    assert state.drained == 0
    assert ask(port, "/drain", "POST")[:2] == (202, "draining\n")
    assert state.drained == 1


def test_unknown_paths_name_the_known_ones(port):
    status, body, _ = ask(port, "/health")
    assert status == 404
    assert "/readyz" in body


def test_a_probe_that_crashes_is_500_and_the_listener_goes_on(state, caplog):
    def crash():
        raise ZeroDivisionError("planted")

    listener = Listener("127.0.0.1", 0, probes(state, live=crash))
    port = listener.start()
    assert ask(port, "/livez")[0] == 500
    assert ask(port, "/readyz")[0] == 200
    listener.close()
    assert "planted" in caplog.text


def test_a_port_in_use_is_one_plain_sentence(state):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen for HTTP on 127.0.0.1:{port}: address already in use"):
            Listener("127.0.0.1", port, probes(state)).start()


def test_a_host_that_is_not_ours_is_one_plain_sentence(state):
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        Listener("192.0.2.1", 0, probes(state)).start()


def test_closing_frees_the_port_and_is_idempotent(state):
    listener = Listener("127.0.0.1", 0, probes(state))
    port = listener.start()
    listener.close()
    listener.close()
    again = Listener("127.0.0.1", port, probes(state))
    assert again.start() == port
    again.close()


async def test_it_answers_while_the_event_loop_is_stuck(port):
    answers = []
    asking = threading.Thread(target=lambda: answers.append(ask(port, "/livez")[0]))
    asking.start()
    asking.join(timeout=30)  # this blocks the loop, on purpose
    await asyncio.sleep(0)
    assert answers == [200]


def test_a_client_that_says_nothing_blocks_nobody(port):
    with socket.create_connection(("127.0.0.1", port)):
        assert ask(port, "/livez")[0] == 200


def test_a_flood_of_silent_clients_is_bounded_and_passes(port):
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(MAX_CONNECTIONS + 8)]
    before = threading.active_count()
    assert before <= MAX_CONNECTIONS + 10
    for client in silent:
        client.close()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if ask(port, "/livez")[0] == 200:
                return
        except (ConnectionError, http.client.HTTPException):
            continue
    pytest.fail("the listener did not recover from the flood")
