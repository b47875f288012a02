"""Composition root of a gateway process: reads top to bottom as a wiring diagram, then serves until told to leave."""

import asyncio
import logging
import random
import secrets
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from core.aio import Tasks
from core.clock import Clock, SystemClock
from core.config import read_secret
from core.ids import fresh_incarnation
from core.lifecycle import Lifecycle, State
from core.listener import Listener, Probes
from core.metrics import Metrics
from core.process import Departure, ReadyFile
from core.rpc.admin import add_admin
from core.rpc.generate import GenerateClient
from core.rpc.health import Health
from core.rpc.kv_index import KvIndexClient
from core.rpc.membership import add_membership
from core.rpc.proof import Proof
from core.rpc.server import RpcServer
from core.tls import check_tls
from core.tracing.factory import open_tracer
from gateway.admin import KIND, GatewayAdmin
from gateway.admission import Admission
from gateway.attempt import RetryBudget
from gateway.cluster import Cluster
from gateway.config import GatewayConfig, GatewayDrain, HttpSection
from gateway.directory import Directory
from gateway.http.asgi import build_asgi
from gateway.http.front import Front
from gateway.http.gatekeeper import Gatekeeper, TenantMetrics
from gateway.http.metrics import HttpMetrics
from gateway.http.server import HttpServer
from gateway.leases import Leases
from gateway.links import Links
from gateway.loop_health import LoopHealth, settle_collector
from gateway.membership import Membership
from gateway.metrics import GatewayMetrics
from gateway.orchestrator import Orchestrator
from gateway.pages import build_pages
from gateway.prefix_index import PrefixIndex
from gateway.rate_limit import RateLimits
from gateway.router import Router
from gateway.routing.picker import Picker
from gateway.series import LoopMetrics
from gateway.tenants import Tenants
from gateway.text.format import load_format
from gateway.text.tokenizer import load_tokenizer, tokenizer_digest
from gateway.trace_recorder import TraceRecorder
from gateway.worker_gauges import WorkerGauges

logger = logging.getLogger(__name__)

REFRESH_S = 0.5
HOLD_POLL_S = 0.1
HTTP_GRACE_S = 5.0
"""For answers whose tokens have all come, once the last sample has ended."""
HTTP_CUT_S = 0.1
"""For answers that are cut off."""
STOP_GRACE_S = 0.2


@dataclass(frozen=True, slots=True)
class _Core:
    """The gateway without its sockets."""

    directory: Directory
    index: PrefixIndex
    links: Links
    admission: Admission
    tenants: Tenants
    leases: Leases
    router: Router
    recorder: TraceRecorder | None
    orchestrator: Orchestrator
    membership: Membership


async def serve(config: GatewayConfig, departure: Departure) -> None:
    """Run until `departure`, finish what is open within its budget, and return."""
    clock = SystemClock()
    lifecycle = Lifecycle(lambda state: logger.info("state: %s", state.value))
    secret = read_secret(config.secret_file) if config.secret_file else b""
    proof = Proof(secret, fresh_incarnation(), check_tls(config.tls))
    metrics = LoopMetrics()
    gateway_metrics = GatewayMetrics(metrics)
    async with AsyncExitStack() as stack:
        tasks = Tasks(departure.task_crashed)
        core = _compose(config, proof=proof, secret=secret, clock=clock, metrics=gateway_metrics, tasks=tasks)
        stack.push_async_callback(core.links.close)
        if core.recorder is not None:
            stack.callback(core.recorder.close)
        admin = GatewayAdmin(
            name=config.id,
            incarnation=proof.incarnation,
            lifecycle=lifecycle,
            directory=core.directory,
            index=core.index,
            links=core.links,
            admission=core.admission,
            metrics=gateway_metrics,
            clock=clock,
            drain=departure.begin,
            stall_s=config.listener.stall_s,
            leases=core.leases,
            gauges=WorkerGauges(metrics),
        )
        listener_address = _open_listener(config, admin, metrics, departure, stack)
        membership_address, health = await _open_membership(config, core.membership, admin, proof, stack)
        http = await _open_http(config, core, admin=admin, metrics=metrics, clock=clock, stack=stack)
        stack.push_async_callback(http.drain, HTTP_CUT_S)
        stack.push_async_callback(tasks.close)
        tasks.spawn(core.membership.sweep(), name="membership sweep")
        tasks.spawn(_refresh(admin, health, http), name="gauges")
        tasks.spawn(core.tenants.follow(), name="keys")
        if core.recorder is not None:
            tasks.spawn(core.recorder.follow(), name="trace recorder")
        tasks.spawn(LoopHealth(metrics, clock).watch(), name="loop health")
        settle_collector()
        lifecycle.move(State.READY)
        facts = {
            "http_address": f"{config.http.host}:{http.port}",
            "membership_address": membership_address,
            "listener_address": listener_address,
            "model": config.model.name,
        }
        admin.publish(facts)
        admin.refresh()
        ready_file = ReadyFile(config.run_dir, config.id)
        stack.callback(ready_file.remove)
        ready_file.write({"id": config.id, "kind": KIND, "incarnation": proof.incarnation, **facts})
        logger.info("serving at http://%s, workers join at %s", facts["http_address"], membership_address)
        await departure.wait()
        await _leave(lifecycle, core.admission, http, departure, config.drain)


def _compose(
    config: GatewayConfig, *, proof: Proof, secret: bytes, clock: Clock, metrics: GatewayMetrics, tasks: Tasks
) -> _Core:
    directory = Directory(
        clock,
        ttl_s=config.membership.ttl_s,
        max_workers=config.membership.max_workers,
        mixed_fingerprints=config.membership.mixed_fingerprints,
        breaker=config.breaker,
    )
    index = PrefixIndex()
    links = Links(
        gateway=proof.incarnation,
        opener=GenerateClient(proof),
        clock=clock,
        rules=config.links,
        silence_s=config.membership.ttl_s,
    )
    router = Router(
        directory=directory,
        index=index,
        secret=secret,
        rules=config.routing,
        # Each process its own seed: gateways that rotate in step would all choose the same worker.
        picker=Picker(random.Random(secrets.randbits(64))),  # noqa: S311 - load spreading, no secret
        clock=clock,
    )
    tenants = Tenants(config.access.keys_file, lambda is_ok: metrics.reloads.labels("ok" if is_ok else "failed").inc())
    leases = Leases(clock)
    cluster = Cluster(
        directory=directory,
        router=router,
        links=links,
        clock=clock,
        retries=config.retries,
        routing=config.routing,
        budget=RetryBudget(config.retries),
        metrics=metrics,
        leases=leases,
        recorder=TraceRecorder(config.recorder, config.id, clock) if config.recorder.directory else None,
    )
    admission = Admission(clock, config.limits, tenants.named, leases)
    orchestrator = Orchestrator(cluster, admission)
    membership = Membership(
        directory=directory,
        index=index,
        links=links,
        snapshots=KvIndexClient(proof),
        proof=proof,
        clock=clock,
        tasks=tasks,
        model=config.model.name,
        siblings=config.membership.siblings,
        on_joined=orchestrator.registered,
        tokenizer=tokenizer_digest(Path(config.model.path)),
    )
    links.on_lost(membership.link_lost)
    return _Core(
        directory, index, links, admission, tenants, leases, router, cluster.recorder, orchestrator, membership
    )


async def _open_http(
    config: GatewayConfig, core: _Core, *, admin: GatewayAdmin, metrics: Metrics, clock: Clock, stack: AsyncExitStack
) -> HttpServer:
    tokenizer = load_tokenizer(Path(config.model.path), lambda: datetime.now(UTC))
    gate = Gatekeeper(core.tenants, RateLimits(clock, lambda: config.limits.share), TenantMetrics(metrics))
    api = build_asgi(
        core.orchestrator,
        tokenizer,
        load_format(Path(config.model.path), tokenizer, config.api.images, config.api.parsing),
        config.api,
        clock=clock,
        metrics=HttpMetrics(metrics.registry),
        is_ready=lambda: not admin.ready(),
        unix_time=time.time,  # noqa: TID251 - the wall-clock field `created` of OpenAI's answers
        model=config.model.name,
        gate=gate,
    )
    tracer = open_tracer(config.tracing, service="gateway", instance=config.id)
    stack.callback(tracer.close)
    front = Front(
        api,
        gate=gate,
        pages=build_pages(admin.status, core.leases, core.router.placer.decisions),
        clock=clock,
        tracer=tracer,
        leases=core.leases,
        access_log=config.access.log,
    )
    section = config.http
    http = HttpServer(
        front,
        section.host,
        section.port,
        guard=section.guard,
        tls=section.tls,
        reuse_port=section.reuse_port,
        listener_fd=section.listener_fd,
        hold=lambda: _workers_there(section, admin, clock),
    )
    await http.start()
    return http


async def _workers_there(section: HttpSection, admin: GatewayAdmin, clock: Clock) -> None:
    end = clock.now() + section.hold_s
    while clock.now() < end:
        roles = {worker["role"] for worker in admin.status().get("workers", ()) if worker["routable"]}
        if roles.issuperset(section.hold_for):
            return
        await asyncio.sleep(HOLD_POLL_S)


def _open_listener(
    config: GatewayConfig, admin: GatewayAdmin, metrics: Metrics, departure: Departure, stack: AsyncExitStack
) -> str:
    probes = Probes(
        live=admin.live,
        ready=admin.ready,
        started=admin.started,
        metrics=metrics.render,
        status=admin.status,
        drain=departure.begin_from_thread,
    )
    listener = Listener(config.listener.host, config.listener.port, probes)
    port = listener.start()
    stack.callback(listener.close)
    return f"{config.listener.host}:{port}"


async def _open_membership(
    config: GatewayConfig, membership: Membership, admin: GatewayAdmin, proof: Proof, stack: AsyncExitStack
) -> tuple[str, Health]:
    server = RpcServer(proof)
    add_membership(server, membership)
    add_admin(server, admin)
    port = await server.start(config.membership.host, config.membership.port)
    stack.push_async_callback(server.stop, STOP_GRACE_S)
    return f"{config.membership.advertise_host or config.membership.host}:{port}", server.health


async def _leave(
    lifecycle: Lifecycle, admission: Admission, http: HttpServer, departure: Departure, rules: GatewayDrain
) -> None:
    """Refuse new requests, let the open ones end within the budget, then close the HTTP side."""
    if departure.error is not None:
        lifecycle.move(State.FAILED)
        return
    lifecycle.move(State.DRAINING)
    if rules.hand_over:
        http.hand_over()
    await departure.bound(asyncio.sleep(rules.accept_s))
    if rules.hand_over:
        await departure.bound(http.close_idle())
    admission.drain()
    finished = await departure.bound(admission.idle())
    if not finished:
        logger.warning("%d samples are cut off: the drain budget is over", admission.in_flight)
    await http.drain(HTTP_GRACE_S if finished else HTTP_CUT_S)
    lifecycle.move(State.GONE)


async def _refresh(admin: GatewayAdmin, health: Health, http: HttpServer) -> None:
    while True:
        admin.refresh()
        http.follow_certificate()
        await health.show(not admin.ready())
        await asyncio.sleep(REFRESH_S)
