"""T3, A16, A20: workers on hosts of their own (network namespaces); slow, lossy and cut cables between them.

On every host iptables let through what the manifests' network policies allow and nothing else, in all tests of this file.
Every stream is compared with what the scripted model must say; its text depends on every byte of KV that was moved.
"""

import asyncio
import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from benchmarks.record import write_record
from deploy.autoscale.decide import Memory, decide
from deploy.autoscale.signals import Rules
from deploy.cluster_description import PortsPart
from deploy.lab.links import Switch
from deploy.lab.rules import rules
from deploy.validate_network import allowed_pairs, needed_pairs
from engine.models.builtin import prepare_scripted
from engine.models.script import ScriptedConfig
from tests.deploy.linked_cluster import HEALTH, HTTP, MEMBERSHIP, TRANSFER, WORKER, Load, linked_cluster
from tests.deploy.overlays import overlay
from tests.fakes.chaos import faults
from tests.fakes.live_cluster import wait_for
from tests.fakes.truth import scripted_text

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

WORKERS = {"prefill-1": "prefill", "decode-1": "decode", "decode-2": "decode"}
SPARE = {"prefill-2": "prefill"}
OUTSIDE = {name: name for name in ("controller", "client", "monitoring")}
HOSTS = {"gateway": "gateway", **WORKERS, **SPARE, **OUTSIDE}
MODEL = ScriptedConfig(mean_length=100_000, kv_lanes=64, step_delay_ms=5.0)
"""A kilobyte of KV a token, so that a slow link is felt; and slow enough that streams are open when a cable is cut."""
DATA = [("prefill-1", "decode-1"), ("prefill-1", "decode-2")]
CONTROL = [("gateway", host) for host in WORKERS]
LISTENING = {"gateway": (HTTP, MEMBERSHIP, HEALTH), "prefill": (WORKER, TRANSFER, HEALTH), "decode": (WORKER, HEALTH)}
"""By role; TCP ports of its processes. Only prefill workers serve KV."""
STOPPED_S = 15.0
"""A lease is 3 s; the rest is for a machine that does other things too. TCP alone would take minutes."""
ENDED_S = 60.0
WHOLE = {"delay_ms": 0.0, "loss": 0.0, "mbit": 0.0, "is_up": True}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    for program in ("nsenter", "iptables-restore"):
        if shutil.which(program) is None:
            (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{program} is not installed")
    try:
        with Switch(["one"]) as switch:
            sample = rules("decode", {"gateway": ["192.0.2.1"]}, [("gateway", "decode", WORKER)])
            restore = [*switch.entering("one"), "iptables-restore"]
            tried = subprocess.run(restore, input=sample, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"this machine gives no network namespaces or TAP devices (they need root): {error}")
    if tried.returncode != 0:
        pytest.skip(f"the kernel of this machine takes no such rules of iptables: {tried.stderr.strip()}")
    folder = tmp_path_factory.mktemp("links")
    pairs = allowed_pairs(overlay("base"))
    with linked_cluster(folder / "run", prepare_scripted(folder, MODEL), "slow", HOSTS, pairs, SPARE) as running:
        yield running


@pytest.fixture(scope="module")
def figures():
    """What is measured; a record of it is written where `TANDEM_RECORD` names one."""
    found = {}
    yield found
    if name := os.environ.get("TANDEM_RECORD"):
        note = "4 hosts in network namespaces, scripted model, 1 kB of KV a token; streams with a fault: 0"
        write_record(name, {**found, "load_average": os.getloadavg()}, note=note)


@pytest.fixture(autouse=True)
def whole_cables(cluster):
    yield
    cluster.switch.shape([*DATA, *CONTROL, ("decode-1", "decode-2")], **WHOLE)
    wait_for(lambda: cluster.routable() == {*WORKERS}, 60, "a worker does not come back")


def items(seed, count=8, tokens=60):
    """Prompts of some hundred tokens, no two alike, and what must be said."""
    made = []
    for number in range(count):
        prompt = f"stream {number} of round {seed}: " + "the words of a prompt " * (5 + number)
        made.append((prompt, scripted_text(prompt, tokens, MODEL), tokens))
    return made


def test_workers_on_hosts_of_their_own_say_what_one_process_says(cluster):
    outcomes = cluster.storm(items(1, 8))
    assert [f for o in outcomes for f in faults(o)] == []
    landed = {host: cluster.counted(host, "tandem_transfer_landed_bytes_total") for host in ("decode-1", "decode-2")}
    prompts = sum(len(o.prompt) for o in outcomes)
    assert sum(landed.values()) > 1000 * prompts, "KV of every prompt crossed the cable"
    assert all(landed.values()), "both decode hosts had work"
    assert sum(cluster.counted(host, "tandem_recomputed_tokens_total") for host in landed) == 0


def test_network_policies_let_pools_scale_and_refuse_everything_else(cluster, figures):
    """A16: A2 under the rules; what a cluster opens is what they allow, and whoever tries another connection fails."""
    untouched = cluster.processes["decode-1"].pid
    landed = cluster.counted("decode-1", "tandem_transfer_landed_bytes_total")
    with Load(cluster, items) as load:
        cluster.joins("prefill-2")
        assert cluster.leaves("prefill-2") == 0
        assert cluster.leaves("decode-2") == 0
        cluster.joins("decode-2")
    assert load.faults() == []
    assert cluster.processes["decode-1"].pid == untouched
    assert cluster.counted("decode-1", "tandem_transfer_landed_bytes_total") > landed
    is_over = iter([False, True])
    cluster.switch.on("controller", lambda: asyncio.run(cluster.signals(lambda: next(is_over))))
    for host in ("gateway", *WORKERS):
        assert cluster.get("monitoring", f"{cluster.address(host)}:{HEALTH}", "/metrics")
    needed = {pair for pair in needed_pairs(PortsPart()) if pair[1] != "controller"}  # whose process is not here
    assert cluster.pairs_used() == needed
    tried = {
        (source, target, port): cluster.connects(source, target, port)
        for target, ports in LISTENING.items()
        for port in ports
        for source in ("gateway", "prefill", "decode", *OUTSIDE)
        if source != target
    }
    figures["connections tried between roles, and refused"] = [len(tried), len(tried) - sum(tried.values())]
    assert {pair for pair, connects in tried.items() if connects} == needed


def test_slow_and_lossy_cables_lose_nothing(cluster, figures):
    cluster.switch.shape([*DATA, *CONTROL], delay_ms=5.0, loss=0.01, mbit=200.0)
    before, begun = cluster.switch.dropped, time.monotonic()
    outcomes = cluster.storm(items(2, 12))
    figures["5 ms, 1 % loss, 200 Mbit/s on every cable"] = {
        "streams": len(outcomes),
        "seconds": round(time.monotonic() - begun, 1),
        "frames lost": cluster.switch.dropped - before,
    }
    assert [f for o in outcomes for f in faults(o)] == []
    assert cluster.switch.dropped > before, "the cables lost nothing: the test shows nothing"


# Before the tests that cut cables: behind those, decode hosts compute for a while what they could pull.
def test_a_full_link_is_told_to_the_controller_and_holds_prefill(cluster, figures):
    """More prefill would only lengthen the queue: the decision that would add one says `network_bound` instead."""
    cluster.switch.shape(DATA, mbit=20.0)
    long = [(f"{number} " + "a long prompt " * 200, 4) for number in range(6)]
    with ThreadPoolExecutor(1) as thread:
        busy = thread.submit(cluster.storm, [(p, scripted_text(p, n, MODEL), n) for p, n in long])
        seen = cluster.switch.on("controller", lambda: asyncio.run(cluster.signals(busy.done)))
        outcomes = busy.result()
    assert [f for o in outcomes for f in faults(o)] == []
    waiting = [s for s in seen if s.kv_backlog_bytes]
    rates = [s.kv_bytes_per_s for s in waiting if s.kv_bytes_per_s]
    figures["data cables of 20 Mbit/s: KV that waited (s, most), its rate (MB/s, least and most)"] = [
        round(max(s.kv_backlog_bytes / s.kv_bytes_per_s for s in waiting if s.kv_bytes_per_s), 1),
        round(min(rates) / 1e6, 1),
        round(max(rates) / 1e6, 1),
    ]
    needy = Rules(prefill_tokens_per_s=10.0)  # whoever looked at the queue alone would start more
    decisions = [
        decide(needy, Memory.fresh(s.now), msgspec.structs.replace(s, prefill_tokens_per_s=0.0))[0] for s in seen
    ]
    assert "network_bound" in {d.prefill.reason for d in decisions}
    assert all(d.prefill.target == 1 for d in decisions if d.needs.network_bound)


def test_a_host_that_is_cut_off_gets_no_more_work_and_its_streams_move(cluster, figures):
    with Load(cluster, lambda seed: items(seed, tokens=400)) as load:
        # What a gateway was told last may have ended since: then another cable is pulled at another moment.
        before, tries = cluster.moved(), 0
        while cluster.moved() == before and tries < 4:
            tries += 1
            wait_for(lambda: cluster.running("decode-1"), 60, "no stream is on that host")
            cluster.switch.cut("decode-1")
            begun = time.monotonic()
            wait_for(lambda: "decode-1" not in cluster.routable(), 60, "the lease does not end")
            stopped_s = time.monotonic() - begun
            cluster.switch.cut("decode-1", is_up=True)
            plugged_s = time.monotonic() - begun
            wait_for(lambda: "decode-1" in cluster.routable(), 60, "it does not come back")
            assert stopped_s < STOPPED_S
    figures["a decode host cut off under load, without a reset"] = {
        "streams": len(load.outcomes),
        "no more traffic after (s)": round(stopped_s, 2),
        "back after its cable (s)": round(time.monotonic() - begun - plugged_s, 2),
        "streams that moved": cluster.moved() - before,
    }
    assert load.faults() == []
    assert cluster.moved() > before, "no stream was on that host: the test shows nothing"


def test_a_decode_host_without_its_cable_to_prefill_is_no_reason_to_fail(cluster, figures):
    cluster.switch.shape(DATA[:1], is_up=False)
    begun = time.monotonic()
    outcomes = cluster.storm(items(4, 8))
    took = figures["one of two data cables cut, 8 streams (s)"] = round(time.monotonic() - begun, 1)
    assert [f for o in outcomes for f in faults(o)] == []
    assert took < ENDED_S


def test_without_any_cable_between_the_pools_decode_hosts_compute_prompts_themselves(cluster, figures):
    cluster.switch.shape(DATA, is_up=False)
    landed = [cluster.counted(host, "tandem_transfer_landed_bytes_total") for _, host in DATA]
    begun = time.monotonic()
    outcomes = cluster.storm(items(5, 6))
    took = figures["all data cables cut, 6 streams (s)"] = round(time.monotonic() - begun, 1)
    assert [f for o in outcomes for f in faults(o)] == []
    assert took < ENDED_S
    assert [cluster.counted(host, "tandem_transfer_landed_bytes_total") for _, host in DATA] == landed
