"""Whole workers whose KV lies on a (fake) device: what they say is what a single worker says, over every way between them.

The device's memory cannot be touched by a CPU instruction under the addresses that transports are given; the model sees it
as tensors, as it does on a GPU. A model that keeps rings and one that keeps packed windows move rows as well as pages.
"""

import asyncio
import ctypes

import pytest
import torch

from core.request import StopRules
from decode_worker.app import serve as serve_decode
from decode_worker.config import DecodeWorkerConfig
from engine.models.builtin import prepare_builtin
from kv_transfer.device_memory import allocate_on_device
from kv_transfer.pool import Pool
from prefill_worker.app import serve as serve_prefill
from prefill_worker.config import PrefillWorkerConfig
from tests.fakes.fake_cuda import FakeCuda, host_address
from tests.fakes.worker_cluster import WorkerCluster, ask

SERVE = {"prefill": (PrefillWorkerConfig, serve_prefill), "decode": (DecodeWorkerConfig, serve_decode)}
PROMPT = tuple(32 + token * 7 % 80 for token in range(75))


def tensors_over(spans, device):
    return [
        torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(host_address(address)), dtype=torch.uint8)
        for address, nbytes in spans
    ]


@pytest.fixture
def on_device(monkeypatch):
    """Puts pools of the named roles onto one fake device, which it returns by the cluster's folder."""

    def put(cluster, *roles):
        cuda = FakeCuda(str(cluster.segments))

        def open_pool(sizes, **_):
            return Pool(allocate_on_device(sizes, cuda=cuda, device=0), cuda)

        for role in roles:
            monkeypatch.setattr(f"{role}_worker.app.open_pool", open_pool)
            monkeypatch.setattr(f"{role}_worker.app.tensors_over", tensors_over)
        return cuda

    return put


WAYS = [
    ("tiny-window", "auto", ("prefill", "decode"), "cuda-ipc"),
    ("tiny-window", "tcp", ("prefill", "decode"), "tcp"),
    ("tiny-window", "auto", ("prefill",), "tcp"),
    ("tiny-window", "auto", ("decode",), "shm"),
    pytest.param("v41-tiny", "auto", ("prefill", "decode"), "cuda-ipc", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("model", "transport", "roles", "used"), WAYS)
async def test_pools_on_a_device_change_no_token(tmp_path, tmp_path_factory, on_device, model, transport, roles, used):
    directory = prepare_builtin(model, tmp_path_factory.getbasetemp() / "models")
    sets = (f'transfer.transports=["{transport}"]', "transfer.digests=true", "engine.chunk_tokens=64")
    stop = StopRules(max_tokens=12, ignore_eos=True)
    (tmp_path / "alone").mkdir()
    async with WorkerCluster(tmp_path / "alone", directory, SERVE) as alone:
        gateway = await alone.gateway(await alone.run("decode", sets))
        local, _ = await gateway.answer(1, ask(PROMPT, stop=stop))
    async with WorkerCluster(tmp_path, directory, SERVE) as cluster:
        cuda = on_device(cluster, *roles)
        prefill, decode = await asyncio.gather(cluster.run("prefill", sets), cluster.run("decode", sets))
        gateway = await cluster.gateway(decode)
        # Read in full remotely first: a prefix that the decode worker has would not be pulled.
        remote, _ = await gateway.answer(1, ask(PROMPT, stop=stop), prefill.target)
        found = await cluster.settled(decode)
        assert found[f"transfer_bytes_landed_{used}"] >= found["transfer_bytes_pulled"] > 0
        other, _ = await gateway.answer(2, ask(PROMPT[::-1], stop=stop, request_id="req-2"))
        again, _ = await gateway.answer(3, ask(PROMPT[::-1], stop=stop, request_id="req-3"), prefill.target)
        assert (remote, other) == (local, again)
        await cluster.settled(prefill)
        for worker in (decode, prefill):
            await worker.leave()
        assert not cuda.allocations, "device memory outlived its worker"
