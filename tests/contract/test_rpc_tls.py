"""Mutual TLS between processes, and the health service, over real connections."""

import asyncio
import shutil

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from core.errors import ConfigError, WorkerLost
from core.ids import Incarnation
from core.lifecycle import State
from core.rpc.admin import AdminClient, Description, Statistics, add_admin
from core.rpc.proof import Proof
from core.rpc.server import RpcServer
from core.tls import TlsSection, check_tls
from tests.fakes.certificates import Authority
from tests.fakes.rpc import SECRET, a_proof, serving


class Admin:
    async def describe(self):
        return Description(name="d1", incarnation=Incarnation("d" * 32), kind="decode", state=State.READY)

    async def drain(self, budget_s):
        return State.DRAINING

    async def statistics(self, audit):
        return Statistics()


def section(authority, name, *names):
    certificate, key = authority.issue(name, *(names or ("tandem",)))
    return TlsSection(certificate=certificate, key=key, authority=authority.path)


def proof(tls):
    return Proof(SECRET, Incarnation("c" * 32), tls)


def admin(server):
    add_admin(server, Admin())


async def test_processes_with_certificates_of_one_authority_talk(tmp_path):
    authority = Authority(tmp_path)
    async with serving(admin, proof=proof(section(authority, "server"))) as address:
        told = await AdminClient(proof(section(authority, "client"))).describe(address)
        assert told.name == "d1"


async def test_who_has_no_certificate_or_a_foreign_one_reaches_nothing(tmp_path):
    authority = Authority(tmp_path)
    foreign_dir = tmp_path / "foreign"
    foreign_dir.mkdir()
    foreign = Authority(foreign_dir, "foreign")
    ours = section(authority, "server")
    impostor = section(foreign, "impostor")
    stranger = TlsSection(certificate=impostor.certificate, key=impostor.key, authority=authority.path)
    async with serving(admin, proof=proof(ours)) as address:
        for client in (a_proof(), proof(stranger), proof(impostor)):
            with pytest.raises(WorkerLost):
                await AdminClient(client).describe(address, timeout_s=1.0)
    # Nor does a client of ours talk to a server that only claims the name.
    async with serving(admin, proof=proof(impostor)) as address:
        with pytest.raises(WorkerLost):
            await AdminClient(proof(section(authority, "client"))).describe(address, timeout_s=1.0)


async def test_a_server_must_carry_the_name_of_the_cluster(tmp_path):
    authority = Authority(tmp_path)
    async with serving(admin, proof=proof(section(authority, "server", "else.example"))) as address:
        with pytest.raises(WorkerLost):
            await AdminClient(proof(section(authority, "client"))).describe(address, timeout_s=1.0)


async def test_a_renewed_certificate_is_used_without_a_restart(tmp_path):
    authority, fresh_dir = Authority(tmp_path), tmp_path / "fresh"
    fresh_dir.mkdir()
    fresh = Authority(fresh_dir)
    ours = section(authority, "server")
    async with serving(admin, proof=proof(ours)) as address:
        renewed = section(fresh, "server")
        for old, new in (
            (ours.certificate, renewed.certificate),
            (ours.key, renewed.key),
            (ours.authority, fresh.path),
        ):
            shutil.copy(new, old)
        told = await AdminClient(proof(section(fresh, "client"))).describe(address)
        assert told.name == "d1"


def test_half_a_set_of_files_is_refused_in_words(tmp_path):
    with pytest.raises(ConfigError, match="all three or none"):
        check_tls(TlsSection(key="somewhere"))
    with pytest.raises(ConfigError, match="cannot read"):
        check_tls(TlsSection(certificate="/nowhere", key="/nowhere", authority="/nowhere"))
    text = tmp_path / "text"
    text.write_text("no certificate")
    with pytest.raises(ConfigError, match="not a PEM file"):
        check_tls(TlsSection(certificate=str(text), key=str(text), authority=str(text)))
    assert check_tls(TlsSection()) is None


async def test_the_health_service_needs_no_secret_and_follows_readiness():
    server = RpcServer(a_proof())
    port = await server.start("127.0.0.1", 0)
    serving_status = health_pb2.HealthCheckResponse
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            await server.health.show(is_ready=False)
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status == serving_status.NOT_SERVING
            watch = stub.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == serving_status.NOT_SERVING
            await server.health.show(is_ready=True)
            async with asyncio.timeout(30):
                assert (await watch.read()).status == serving_status.SERVING
            watch.cancel()
            with pytest.raises(aio.AioRpcError) as caught:
                await stub.Check(health_pb2.HealthCheckRequest(service="unknown"))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    finally:
        await server.stop(0)
