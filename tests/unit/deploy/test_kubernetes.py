"""Sizing on Kubernetes: who leaves is who drained, orders of a replaced controller are refused, writers do not overwrite."""

import asyncio
import ssl
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from core.clock import ManualClock, SystemClock
from core.errors import ConfigError
from deploy.actuators.api import StaleFence
from deploy.actuators.kubernetes import KubernetesActuator, drain_budget_s, instance_of, worker_address
from deploy.actuators.kubernetes_api import Conflict, HttpKubernetesApi
from deploy.cli import main
from deploy.controller.lease import DURATION_S, LeaseLock
from deploy.kubernetes_commands import as_leader, fence_of, scale
from tests.fakes.certificates import Authority
from tests.fakes.kubernetes import FakeKubernetesApi


def an_actuator(api, **changes):
    settings = {"namespace": "tandem", "remove_timeout_s": 5.0, "drain": api.drain, "poll_s": 0.001}
    return KubernetesActuator(api, SystemClock(), **{**settings, **changes})


@pytest.mark.parametrize("honours_cost", [True, False])
async def test_the_pod_that_drained_is_the_one_that_goes(honours_cost):
    api = FakeKubernetesApi()
    api.honours_cost = honours_cost  # Kubernetes 1.20 does not know it
    actuator = an_actuator(api)
    await actuator.ensure("decode", 4, fence=1)
    for victim in ("decode-1", "decode-3", "decode-2"):
        await actuator.remove(victim, fence=1)
    assert api.deleted == ["decode-1", "decode-3", "decode-2"]
    assert api.counts["decode"] == 1


async def test_without_a_drain_another_pod_would_go():
    """Negative control: the count alone lets Kubernetes choose."""
    api = FakeKubernetesApi()
    await an_actuator(api).ensure("decode", 3, fence=1)
    api.resize("decode", 2)
    assert api.deleted == ["decode-3"]


async def with_one_that_starts(**changes):
    """Three decode pods, the last of which is not ready yet; Kubernetes 1.20, which knows no cost."""
    api = FakeKubernetesApi()
    api.honours_cost = False
    actuator = an_actuator(api, **changes)
    await actuator.ensure("decode", 2, fence=1)
    api.starts_ready = False
    await actuator.ensure("decode", 3, fence=1)
    return api, actuator


async def test_a_pod_that_starts_is_not_removed_instead_of_the_one_that_drains():
    api, actuator = await with_one_that_starts()
    removing = asyncio.create_task(actuator.remove("decode-1", fence=1))
    await asyncio.sleep(0.05)
    assert not removing.done()
    assert [i.state for i in await actuator.list()] == ["ready", "ready", "starting"], "nobody drains in vain"
    api.pods["decode-3"]["status"]["conditions"][0]["status"] = "True"
    await removing
    assert api.deleted == ["decode-1"]


async def test_a_pod_that_crashes_is_named_instead_of_waited_for():
    api, actuator = await with_one_that_starts()
    api.pods["decode-3"]["status"]["containerStatuses"] = [{"state": {"waiting": {"reason": "CrashLoopBackOff"}}}]
    with pytest.raises(ConfigError, match=r"decode-3 is not ready \(CrashLoopBackOff\)"):
        await actuator.remove("decode-1", fence=1)
    await actuator.remove("decode-3", fence=1)
    assert api.deleted == ["decode-3"]


async def test_a_smaller_pool_lets_those_go_first_that_do_not_serve_yet():
    api, actuator = await with_one_that_starts()
    await scale(actuator, "decode", 2, 1, lambda _: None)
    assert api.deleted == ["decode-3"]


async def ignored(_pod):
    pass


async def test_a_pod_that_stays_ready_is_not_removed(monkeypatch):
    api = FakeKubernetesApi()
    actuator = an_actuator(api, drain=ignored)
    await actuator.ensure("decode", 2, fence=1)
    monkeypatch.setattr("deploy.actuators.kubernetes.NOT_READY_S", 0.0)
    with pytest.raises(ConfigError, match="stays ready"):
        await actuator.remove("decode-1", fence=1)
    assert api.counts["decode"] == 2
    assert [i.state for i in await actuator.list()] == ["ready", "ready"], "it is not taken for leaving"
    await an_actuator(api).remove("decode-1", fence=1)  # and a later removal succeeds
    assert api.deleted == ["decode-1"]


async def test_a_second_writer_is_not_overwritten():
    api = FakeKubernetesApi()
    actuator = an_actuator(api)
    await actuator.ensure("decode", 2, fence=1)
    api.before_put = lambda: api.resize("decode", 5)
    await actuator.ensure("decode", 3, fence=1)
    assert api.counts["decode"] == 5


def test_a_pod_tells_its_address_and_how_long_it_may_drain():
    api = FakeKubernetesApi()
    api.add("decode")
    pod = api.pods["decode-1"] | {"spec": {"containers": [{"ports": [{"name": "worker", "containerPort": 9600}]}], "terminationGracePeriodSeconds": 615}}  # fmt: skip
    assert (worker_address(pod), drain_budget_s(pod)) == ("10.0.0.1:9600", 604.0)
    pod["status"]["podIP"] = "fd00::1"
    assert worker_address(pod) == "[fd00::1]:9600"


def a_pod(**status):
    return {
        "metadata": {"name": "p", "labels": {"tandem/role": "decode"}},
        "spec": {"containers": [{}]},
        "status": status,
    }


READY = [{"type": "Ready", "status": "True"}]
CRASHED = [{"state": {"waiting": {"reason": "CrashLoopBackOff"}}}]
FULL = [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}]


@pytest.mark.parametrize(
    ("pod", "state", "reason"),
    [
        (a_pod(phase="Running", conditions=READY), "ready", ""),
        (a_pod(phase="Pending", conditions=FULL), "starting", "0/3 nodes are available"),
        (a_pod(phase="Running", containerStatuses=CRASHED), "backoff", "CrashLoopBackOff"),
        (a_pod(phase="Failed"), "gone", ""),
        (
            {**a_pod(phase="Running", conditions=READY), "metadata": {"name": "p", "deletionTimestamp": "x"}},
            "draining",
            "",
        ),
    ],
)
def test_a_pod_is_told_as_every_place_tells_it(pod, state, reason):
    found = instance_of(pod)
    assert (found.state, found.reason) == (state, reason)


async def test_one_controller_leads_and_its_successor_has_a_larger_fence():
    api, clock = FakeKubernetesApi(), ManualClock()
    first, second = LeaseLock(api, clock, "one"), LeaseLock(api, clock, "two")
    assert await first.acquire(0) == 1
    waiting = asyncio.create_task(second.acquire(0))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    clock.advance(DURATION_S + 1)  # the first is silent for the whole duration
    assert await waiting == 2
    actuator = an_actuator(api)
    with pytest.raises(StaleFence):
        await actuator.ensure("decode", 1, fence=first.fence)
    with pytest.raises(StaleFence):
        await first.renew(0)
    await second.release()
    assert await first.acquire(0) == 3


async def test_a_lease_that_is_renewed_is_not_taken():
    api, clock = FakeKubernetesApi(), ManualClock()
    stamps = iter(range(10_000))
    first = LeaseLock(api, clock, "one", now=lambda: FakeStamp(next(stamps)))
    await first.acquire(0)
    renewing = asyncio.create_task(first.renew(0.001))
    waiting = asyncio.create_task(LeaseLock(api, clock, "two").acquire(0))
    for _ in range(10):
        before = api.lease["spec"]["renewTime"]
        while api.lease["spec"]["renewTime"] == before:  # noqa: ASYNC110 - the condition is on another's state
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        clock.advance(DURATION_S / 2)
    assert not waiting.done()
    for task in (renewing, waiting):
        task.cancel()


class FakeStamp:
    def __init__(self, number):
        self.number = number

    def strftime(self, _):
        return str(self.number)


class Server(BaseHTTPRequestHandler):
    answers: list
    seen: list

    def do_GET(self):
        length = int(self.headers.get("Content-Length") or 0)
        self.seen.append((self.command, self.path, self.headers["Authorization"], self.rfile.read(length)))
        status, text = self.answers.pop(0)
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_PUT = do_PATCH = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def api_server(tmp_path):
    """A TLS server that answers from a list, and a client with a service account's files."""
    authority = Authority(tmp_path)
    certificate, key = authority.issue("server", "kubernetes.default.svc")
    (tmp_path / "ca.crt").write_text((tmp_path / "authority.pem").read_text())
    (tmp_path / "token").write_text("first\n")
    handler = type("Handler", (Server,), {"answers": [], "seen": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    client = HttpKubernetesApi("tandem", server=f"https://127.0.0.1:{server.server_address[1]}", account=tmp_path)
    yield handler, client, tmp_path
    server.shutdown()
    thread.join()
    server.server_close()


def test_requests_carry_the_token_of_now(api_server):
    handler, client, account = api_server
    handler.answers += [(200, b"{}"), (200, b"{}")]
    client.get("api/v1:pods", {"labelSelector": "tandem/role in (decode)"})
    (account / "token").write_text("second\n")
    client.put("apis/apps/v1:deployments/decode/scale", {"spec": {"replicas": 2}})
    assert handler.seen[0][:3] == (
        "GET",
        "/api/v1/namespaces/tandem/pods?labelSelector=tandem%2Frole+in+%28decode%29",
        "Bearer first",
    )
    assert handler.seen[1] == (
        "PUT",
        "/apis/apps/v1/namespaces/tandem/deployments/decode/scale",
        "Bearer second",
        b'{"spec": {"replicas": 2}}',
    )


def test_what_kubernetes_refuses_is_said_plainly(api_server):
    handler, client, account = api_server
    handler.answers += [(409, b"{}"), (403, b'{"message": "cannot patch pods"}'), (200, b"<html>")]
    with pytest.raises(Conflict, match="second autoscaler"):
        client.put("apis/apps/v1:deployments/decode/scale", {})
    with pytest.raises(ConfigError, match="cannot patch pods"):
        client.patch("api/v1:pods/decode-1", {})
    assert client.get("api/v1:pods") == {"message": "<html>"}
    (account / "token").unlink()
    with pytest.raises(ConfigError, match="does not answer GET pods"):
        client.get("api/v1:pods")


async def test_a_person_sizes_a_pool_in_the_name_of_the_leading_controller():
    api = FakeKubernetesApi()
    api.lease["spec"] = {"leaseTransitions": 7}
    said = []
    assert fence_of(api) == 7
    await scale(an_actuator(api), "decode", 3, fence_of(api), said.append)
    await scale(an_actuator(api), "decode", 1, fence_of(api), said.append)
    assert (api.counts["decode"], api.deleted) == (1, ["decode-2", "decode-3"])
    assert said == ["decode-2: draining", "decode-2: gone", "decode-3: draining", "decode-3: gone"]
    with pytest.raises(ConfigError, match="prefill and decode"):
        await scale(an_actuator(api), "gateway", 1, 7, said.append)
    with pytest.raises(StaleFence):
        await scale(an_actuator(api), "decode", 2, 6, said.append)


@pytest.mark.parametrize("arguments", [["up"], ["down"], ["rollout", "--set", "all:engine.num_pages=64"]])
def test_what_kubectl_does_is_left_to_it(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        main([*arguments, "--on", "k8s"])
    assert left.value.code == 3
    assert "kubectl" in capsys.readouterr().err


async def test_a_rollout_takes_the_lease_from_the_controller_and_gives_it_back():
    api, seen = FakeKubernetesApi(), []
    api.lease["spec"] = {"leaseTransitions": 3, "holderIdentity": "controller-1"}

    async def work(fence):
        seen.append((fence, api.lease["spec"]["holderIdentity"].startswith("rollout-")))
        with pytest.raises(StaleFence):
            await an_actuator(api).ensure("decode", 1, fence=3)

    await as_leader(api, work)
    assert seen == [(4, True)]
    assert (api.lease["spec"]["leaseTransitions"], api.lease["spec"]["holderIdentity"]) == (4, "")


async def test_a_rollout_that_another_command_replaced_says_so_in_words_for_a_person():
    async def work(_):
        raise StaleFence("controller 4 was replaced by controller 5; this one must stop")

    with pytest.raises(ConfigError, match="another command"):
        await as_leader(FakeKubernetesApi(), work)
