"""Composition root of a gateway process: reads top to bottom as a wiring diagram, then serves until told to leave."""

import asyncio
import logging
import random
import secrets
import time
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path

from core.aio import Tasks
from core.clock import SystemClock
from core.config import read_secret
from core.ids import fresh_incarnation
from core.lifecycle import Lifecycle, State
from core.listener import Listener, Probes
from core.metrics import Metrics
from core.process import Departure, ReadyFile
from core.rpc.admin import add_admin
from core.rpc.generate import GenerateClient
from core.rpc.kv_index import KvIndexClient
from core.rpc.membership import add_membership
from core.rpc.proof import Proof
from core.rpc.server import RpcServer
from gateway.admin import KIND, GatewayAdmin
from gateway.admission import Admission
from gateway.attempt import RetryBudget
from gateway.config import GatewayConfig
from gateway.directory import Directory
from gateway.http.asgi import build_asgi
from gateway.http.metrics import HttpMetrics
from gateway.http.server import HttpServer
from gateway.links import Links
from gateway.membership import Membership
from gateway.metrics import GatewayMetrics
from gateway.orchestrator import Orchestrator
from gateway.prefix_index import PrefixIndex
from gateway.router import Router
from gateway.routing.picker import Picker
from gateway.sample import Cluster
from gateway.text.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

REFRESH_S = 0.5
HTTP_GRACE_S = 5.0
"""For answers whose tokens have all come, once the last sample has ended."""
HTTP_CUT_S = 0.1
"""For answers that are cut off."""
STOP_GRACE_S = 0.2


async def serve(config: GatewayConfig, departure: Departure) -> None:
    """Run until `departure`, finish what is open within its budget, and return."""
    clock = SystemClock()
    lifecycle = Lifecycle(lambda state: logger.info("state: %s", state.value))
    secret = read_secret(config.secret_file) if config.secret_file else b""
    proof = Proof(secret, fresh_incarnation())
    tokenizer = load_tokenizer(Path(config.model.path), lambda: datetime.now(UTC))
    metrics = Metrics()
    gateway_metrics = GatewayMetrics(metrics)

    async with AsyncExitStack() as stack:
        tasks = Tasks(lambda _name, error: departure.crash(error))
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
        stack.push_async_callback(links.close)
        router = Router(
            directory=directory,
            index=index,
            secret=secret,
            rules=config.routing,
            # Each process its own seed: gateways that rotate in step would all choose the same worker.
            picker=Picker(random.Random(secrets.randbits(64))),  # noqa: S311 - load spreading, no secret
            clock=clock,
        )
        admission = Admission(clock, config.limits)
        orchestrator = Orchestrator(
            Cluster(
                directory=directory,
                router=router,
                links=links,
                clock=clock,
                retries=config.retries,
                routing=config.routing,
                budget=RetryBudget(config.retries),
                metrics=gateway_metrics,
            ),
            admission,
        )
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
        )
        links.on_lost(membership.link_lost)
        admin = GatewayAdmin(
            name=config.id,
            incarnation=proof.incarnation,
            lifecycle=lifecycle,
            directory=directory,
            index=index,
            links=links,
            admission=admission,
            metrics=gateway_metrics,
            clock=clock,
            drain=departure.begin,
            stall_s=config.listener.stall_s,
        )
        api = build_asgi(
            orchestrator,
            tokenizer,
            config.api,
            clock=clock,
            metrics=HttpMetrics(metrics.registry),
            is_ready=lambda: not admin.ready(),
            unix_time=time.time,  # noqa: TID251 - the wall-clock field `created` of OpenAI's answers
        )

        probes = Probes(
            live=admin.live,
            ready=admin.ready,
            started=admin.started,
            metrics=metrics.render,
            status=admin.status,
            drain=departure.begin_from_thread,
        )
        listener = Listener(config.listener.host, config.listener.port, probes)
        listener_port = listener.start()
        stack.callback(listener.close)
        server = RpcServer(proof)
        add_membership(server, membership)
        add_admin(server, admin)
        membership_port = await server.start(config.membership.host, config.membership.port)
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        http = HttpServer(api, config.http.host, config.http.port)
        await http.start()
        stack.push_async_callback(http.drain, HTTP_CUT_S)
        stack.push_async_callback(tasks.close)
        tasks.spawn(membership.sweep(), name="membership sweep")
        tasks.spawn(_refresh(admin), name="gauges")

        facts = {
            "http_address": f"{config.http.host}:{http.port}",
            "membership_address": f"{config.membership.host}:{membership_port}",
            "listener_address": f"{config.listener.host}:{listener_port}",
            "model": config.model.name,
        }
        admin.publish(facts)
        lifecycle.move(State.READY)
        admin.refresh()
        ready_file = ReadyFile(config.run_dir, config.id)
        stack.callback(ready_file.remove)
        ready_file.write({"id": config.id, "kind": KIND, "incarnation": proof.incarnation, **facts})
        logger.info("serving at http://%s, workers join at %s", facts["http_address"], facts["membership_address"])
        await departure.wait()

        if departure.error is not None:
            lifecycle.move(State.FAILED)
            return
        lifecycle.move(State.DRAINING)
        admission.drain()
        finished = await departure.bound(admission.idle())
        if not finished:
            logger.warning("%d samples are cut off: the drain budget is over", admission.in_flight)
        await http.drain(HTTP_GRACE_S if finished else HTTP_CUT_S)
        lifecycle.move(State.GONE)


async def _refresh(admin: GatewayAdmin) -> None:
    while True:
        admin.refresh()
        await asyncio.sleep(REFRESH_S)
