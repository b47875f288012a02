"""Composition root of a prefill worker: reads top to bottom like a wiring diagram."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack

from core.clock import SystemClock
from core.config import read_secret
from core.exported import ExportedStatistics
from core.ids import fresh_incarnation
from core.lifecycle import State
from core.metrics import Metrics
from core.process import Departure
from core.rpc.kv_source import add_kv_source
from core.rpc.proof import Proof
from core.rpc.server import RpcServer
from core.tls import check_tls
from core.tracing.factory import open_tracer
from core.worker import Registration, Role
from core.worker_shell import WorkerShell
from engine.device import tensors_over
from engine.factory import LoadedModel, load, open_engine
from engine.loop_sink import LoopSink
from kv_transfer.factory import SHARED_MEMORY, TransportFactory, check_transports
from kv_transfer.handshake import expand
from kv_transfer.memory import sweep_stale_segments
from kv_transfer.pool import open_pool
from kv_transfer.settings import TransportSettings
from kv_transfer.source import Source
from prefill_worker.body import PrefillBody
from prefill_worker.config import PrefillWorkerConfig
from prefill_worker.metrics import PREFILL_METRICS
from prefill_worker.service import PrefillService

_LOG = logging.getLogger(__name__)


async def serve(config: PrefillWorkerConfig, departure: Departure) -> None:
    """Run one prefill worker until `departure` begins and its work is done. Raises `ConfigError` at preflight."""
    loop, clock, incarnation = asyncio.get_running_loop(), SystemClock(), fresh_incarnation()
    secret = read_secret(config.worker.secret_file)
    check_transports(config.transfer.transports)
    proof, metrics = Proof(secret, incarnation, check_tls(config.worker.tls)), Metrics()
    exported = ExportedStatistics(metrics, PREFILL_METRICS)
    shell = WorkerShell(
        section=config.worker, kind="prefill", proof=proof, metrics=metrics, departure=departure, clock=clock
    )
    async with AsyncExitStack() as stack:
        shell.open_listener(stack)
        shell.enter(State.LOADING)
        loaded = await asyncio.to_thread(load, config.model, config.engine)
        if departure.has_begun:
            return
        names = expand(config.transfer.transports, on_device=loaded.gpu is not None)
        segments = "" if SHARED_MEMORY.isdisjoint(names) else config.transfer.segment_directory
        if segments:
            sweep_stale_segments(segments)
        pool = open_pool(loaded.region_sizes, gpu=loaded.gpu, incarnation=incarnation, directory=segments)
        stack.callback(pool.close)
        for line in loaded.report():
            _LOG.info("capacity: %s", line)
        buffers = pool.buffers or tensors_over(pool.spans, loaded.device)
        sink = LoopSink(loop, departure.crash)
        engine = open_engine(
            loaded, buffers, secret=secret, sink=sink, clock=clock, on_crash=departure.crash_from_thread
        )
        stack.push_async_callback(engine.stop)
        tracer = open_tracer(config.worker.tracing, service="prefill", instance=config.worker.id)
        stack.callback(tracer.close)
        service = PrefillService(engine, clock, loop, tracer)
        source = Source(
            config=config.transfer,
            incarnation=incarnation,
            fingerprint=loaded.fingerprint,
            layout=loaded.layout,
            regions=pool.regions,
            host=service,
            opener=TransportFactory(
                TransportSettings(incarnation=incarnation, config=config.transfer, cuda=pool.cuda), pool.regions, clock
            ),
            clock=clock,
            on_crash=departure.task_crashed,
            cuda=pool.cuda,
        )
        stack.push_async_callback(source.close)
        service.connect(source)
        sink.connect(service.on_step, shell.push_events)
        shell.enter(State.WARMING)
        engine.start()
        await source.start()

        server = RpcServer(proof)
        add_kv_source(server, source)

        body = PrefillBody(incarnation=incarnation, engine=engine, service=service, source=source)
        await shell.serve(stack, server, body, register=_register(config, loaded, proof, source), exported=exported)


def _register(
    config: PrefillWorkerConfig, loaded: LoadedModel, proof: Proof, source: Source
) -> Callable[[str, str], Registration]:
    return loaded.registration(
        Role.PREFILL,
        config.worker,
        incarnation=proof.incarnation,
        secret_check=proof.check_value(),
        transports=[name for name, _ in source.exports()],
    )
