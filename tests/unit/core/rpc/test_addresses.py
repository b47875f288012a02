"""A `dns:` address stands for every address behind a name; workers follow it as gateways come and go."""

import socket

from core.rpc import addresses
from core.rpc.addresses import expand, look_up


def answers(monkeypatch, hosts):
    def getaddrinfo(name, port, *_, **__):
        if name not in hosts:
            raise socket.gaierror(-2, "unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, int(port))) for host in hosts[name]]

    monkeypatch.setattr(addresses.socket, "getaddrinfo", getaddrinfo)


async def test_a_name_is_every_address_that_it_has(monkeypatch):
    answers(monkeypatch, {"gateways": ["10.0.0.1", "10.0.0.2", "10.0.0.1"]})
    assert await look_up("dns:gateways:9500") == ("10.0.0.1:9500", "10.0.0.2:9500")
    assert await expand(["10.0.0.2:9500", "dns:gateways:9500", "other:1"]) == (
        "10.0.0.2:9500",
        "10.0.0.1:9500",
        "other:1",
    )


async def test_a_name_without_an_answer_is_nobody(monkeypatch):
    answers(monkeypatch, {})
    assert await expand(["dns:gateways:9500"]) == ()


async def test_an_address_of_ip_version_6_gets_brackets(monkeypatch):
    answers(monkeypatch, {"gateways": ["fd00::1"]})
    assert await look_up("dns:gateways:9500") == ("[fd00::1]:9500",)
