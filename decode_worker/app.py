"""Composition root of a decode worker: reads top to bottom like a wiring diagram."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack

from core.aio import Tasks
from core.clock import SystemClock
from core.config import read_secret
from core.exported import ExportedStatistics
from core.ids import Incarnation, fresh_incarnation
from core.lifecycle import State
from core.metrics import Metrics
from core.process import Departure
from core.rpc.generate import add_generate
from core.rpc.kv_source import KvSourceDialer
from core.rpc.proof import Proof
from core.rpc.server import RpcServer
from core.tls import check_tls
from core.tracing.api import Tracer
from core.tracing.factory import open_tracer
from core.worker import Registration, Role
from core.worker_shell import WorkerShell
from decode_worker.body import DecodeBody
from decode_worker.config import DecodeWorkerConfig
from decode_worker.hosting import EngineDesk
from decode_worker.ledger import RequestLedger
from decode_worker.metrics import DECODE_METRICS, stage_times
from decode_worker.receiver import Receiver
from decode_worker.service import DecodeService
from decode_worker.streams import GatewayStreams
from engine.device import tensors_over
from engine.factory import LoadedModel, load, open_engine
from engine.loop_sink import LoopSink
from kv_transfer.destination import Destination
from kv_transfer.factory import TransportFactory, check_transports
from kv_transfer.handshake import expand
from kv_transfer.pool import open_pool
from kv_transfer.settings import TransportSettings

_LOG = logging.getLogger(__name__)


async def serve(config: DecodeWorkerConfig, departure: Departure) -> None:
    """Run one decode worker until `departure` begins and its work is done. Raises `ConfigError` at preflight."""
    loop, clock, incarnation = asyncio.get_running_loop(), SystemClock(), fresh_incarnation()
    secret = read_secret(config.worker.secret_file)
    check_transports(config.transfer.transports)
    proof, metrics = Proof(secret, incarnation, check_tls(config.worker.tls)), Metrics()
    exported = ExportedStatistics(metrics, DECODE_METRICS)
    shell = WorkerShell(
        section=config.worker, kind="decode", proof=proof, metrics=metrics, departure=departure, clock=clock
    )
    async with AsyncExitStack() as stack:
        shell.open_listener(stack)
        shell.enter(State.LOADING)
        loaded = await asyncio.to_thread(load, config.model, config.engine)
        if departure.has_begun:
            return
        # Nobody maps this pool: pages come in, and are read by this process alone.
        pool = open_pool(loaded.region_sizes, gpu=loaded.gpu, incarnation=incarnation)
        stack.callback(pool.close)
        for line in loaded.report():
            _LOG.info("capacity: %s", line)
        buffers = pool.buffers or tensors_over(pool.spans, loaded.device)
        sink = LoopSink(loop, departure.crash)
        engine = open_engine(
            loaded, buffers, secret=secret, sink=sink, clock=clock, on_crash=departure.crash_from_thread
        )
        stack.push_async_callback(engine.stop)
        desk = EngineDesk(engine, loop)
        destination = Destination(
            config=config.transfer,
            incarnation=incarnation,
            fingerprint=loaded.fingerprint,
            layout=loaded.layout,
            regions=pool.regions,
            host=desk,
            dialer=KvSourceDialer(proof),
            opener=TransportFactory(
                TransportSettings(incarnation=incarnation, config=config.transfer, cuda=pool.cuda), pool.regions, clock
            ),
            clock=clock,
            on_crash=departure.task_crashed,
            cuda=pool.cuda,
            observe=stage_times(metrics),
        )
        stack.push_async_callback(destination.close)
        tasks = Tasks(departure.task_crashed)
        stack.push_async_callback(tasks.close)
        tracer = open_tracer(config.worker.tracing, service="decode", instance=config.worker.id)
        stack.callback(tracer.close)
        service = _service(config, incarnation, desk, destination, tasks, tracer=tracer)
        sink.connect(service.on_step, shell.push_events)
        shell.enter(State.WARMING)
        engine.start()
        tasks.spawn(service.keep_time(), name="stream-expiry")

        server = RpcServer(proof)
        add_generate(server, service)

        body = DecodeBody(incarnation=incarnation, engine=engine, service=service, destination=destination)
        await shell.serve(stack, server, body, register=_register(config, loaded, proof), exported=exported)


def _service(
    config: DecodeWorkerConfig,
    incarnation: Incarnation,
    desk: EngineDesk,
    destination: Destination,
    tasks: Tasks,
    *,
    tracer: Tracer,
) -> DecodeService:
    clock, ledger = SystemClock(), RequestLedger(desk)
    return DecodeService(
        streams=GatewayStreams(incarnation, config.stream, clock),
        ledger=ledger,
        receiver=Receiver(config.prefill, desk, ledger, destination, clock),
        tasks=tasks,
        clock=clock,
        tracer=tracer,
    )


def _register(config: DecodeWorkerConfig, loaded: LoadedModel, proof: Proof) -> Callable[[str, str], Registration]:
    return loaded.registration(
        Role.DECODE,
        config.worker,
        incarnation=proof.incarnation,
        secret_check=proof.check_value(),
        transports=expand(config.transfer.transports, on_device=loaded.gpu is not None),
        prefill_mode=config.prefill.mode.value,
    )
