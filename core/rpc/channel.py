"""Client channels: options, fast failure, one connection per channel. Knows no service."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

import grpc
from grpc import aio

from core.errors import WorkerLost
from core.rpc.credentials import channel_credentials
from core.rpc.status import from_status
from core.tls import TlsSection

MAX_MESSAGE_BYTES = 64 << 20
"""Bounds one message both ways: a 1M-token prompt is 4 MB, a snapshot of 1M pages 8 MB."""

KEEPALIVE_OPTIONS: Mapping[str, int] = {
    # A silent peer (cut-off host, stopped process) is noticed in 2 + 4 s; gRPC's own threads answer pings, so a
    # busy event loop is not mistaken for a dead one.
    "grpc.keepalive_time_ms": 2_000,
    "grpc.keepalive_timeout_ms": 4_000,
    # While a ping of gRPC's bandwidth estimator is under way no keepalive ping is sent: this bound, 60 s by default,
    # is then the only one.
    "grpc.http2.ping_timeout_ms": 4_000,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.max_pings_without_data": 0,
}
"""Of both ends."""

CLIENT_OPTIONS: Mapping[str, int] = {
    **KEEPALIVE_OPTIONS,
    "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
    "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
    "grpc.initial_reconnect_backoff_ms": 100,
    # Also how long gRPC gives one attempt to connect; callers' own deadlines are shorter.
    "grpc.min_reconnect_backoff_ms": 5_000,
    "grpc.max_reconnect_backoff_ms": 1_000,
    # Callers retry with knowledge of the request; a transparent retry could run one twice.
    "grpc.enable_retries": 0,
    # Workers are reached directly whatever proxy the environment names.
    "grpc.enable_http_proxy": 0,
    # A fresh channel is a fresh connection, without the back-off that an older one earned.
    "grpc.use_local_subchannel_pool": 1,
}


def open_channel(address: str, tls: TlsSection | None = None) -> aio.Channel:
    """Return a lazy channel to host:port; the caller closes it."""
    options = list(CLIENT_OPTIONS.items())
    if tls is None:
        return aio.insecure_channel(address, options=options)
    credentials, more = channel_credentials(tls)
    return aio.secure_channel(address, credentials, options=[*options, *more])


async def connect(address: str, timeout_s: float, tls: TlsSection | None = None) -> aio.Channel:
    """Return a connected channel; raises `WorkerLost` at the first failed attempt or after `timeout_s`."""
    channel = open_channel(address, tls)
    try:
        async with asyncio.timeout(timeout_s):
            is_connected = await _is_connected(channel)
    except TimeoutError as error:
        await channel.close()
        raise WorkerLost(f"no connection to {address} within {timeout_s:g} s") from error
    except BaseException:
        await channel.close()
        raise
    if not is_connected:
        await channel.close()
        raise WorkerLost(f"no connection to {address}: refused or unreachable")
    return channel


@asynccontextmanager
async def one_call(address: str, timeout_s: float, tls: TlsSection | None = None) -> AsyncGenerator[aio.Channel]:
    """Connect for the body's unary call and close again; the peer's error is raised as itself."""
    channel = await connect(address, timeout_s, tls)
    try:
        yield channel
    except aio.AioRpcError as error:
        raise from_status(error, address) from error
    finally:
        await channel.close()


async def _is_connected(channel: aio.Channel) -> bool:
    while True:
        state = channel.get_state(try_to_connect=True)
        if state is grpc.ChannelConnectivity.READY:
            return True
        if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
            return False
        await channel.wait_for_state_change(state)
