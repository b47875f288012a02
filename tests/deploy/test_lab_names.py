"""The lab's DNS server says what the API server knows, in the form that resolvers read."""

import socket
import struct

from deploy.lab.names import answer, records


def an_item(kind, name, **rest):
    return {"kind": kind, "metadata": {"name": name, "namespace": "tandem"}, **rest}


ITEMS = [
    an_item("Service", "gateway", spec={"clusterIP": "10.96.0.7"}),
    an_item("Service", "gateway-members", spec={"clusterIP": "None"}),
    an_item("Endpoints", "gateway", subsets=[{"addresses": [{"ip": "10.244.2.2"}]}]),
    an_item(
        "Endpoints",
        "gateway-members",
        subsets=[{"addresses": [{"ip": "10.244.2.2"}], "notReadyAddresses": [{"ip": "10.244.3.3"}]}],
    ),
]


class Known:
    def addresses(self, name):
        return records(ITEMS).get(name)


def ask(name, kind=1):
    labels = b"".join(bytes([len(p)]) + p.encode() for p in name.split("."))
    reply = answer(struct.pack(">HHHHHH", 7, 0x100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", kind, 1), Known())
    number, flags, _, count = struct.unpack(">HHHH", reply[:8])
    assert number == 7
    return flags & 15, sorted(
        socket.inet_ntoa(reply[len(reply) - 16 * i - 4 : len(reply) - 16 * i]) for i in range(count)
    )


def test_a_headless_service_is_its_pods_ready_or_not_and_another_one_its_own_address():
    assert ask("gateway-members.tandem.svc.cluster.local") == (0, ["10.244.2.2", "10.244.3.3"])
    assert ask("Gateway.tandem.svc.cluster.local") == (0, ["10.96.0.7"])


def test_an_unknown_name_does_not_exist_and_a_known_one_has_no_ip_version_6():
    assert ask("example.com") == (3, [])
    assert ask("gateway.tandem.svc.cluster.local", kind=28) == (0, [])
