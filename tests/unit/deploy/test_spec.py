"""From one description to each process's configuration."""

import socket
from pathlib import Path

import pytest

from core.errors import ConfigError
from deploy.local import launcher
from deploy.local.spec import (
    ClusterSpec,
    Revision,
    changed_roles,
    check_spec,
    choose_leaving,
    gateway_config,
    next_worker_id,
    overrides,
    threads_per_worker,
    with_sets,
    worker_config,
)


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        (ClusterSpec(transfer="rdma"), "transport"),
        (ClusterSpec(prefill_mode="maybe"), "prefill mode"),
        (ClusterSpec(prefill=0), "0 prefill workers"),
        (ClusterSpec(sets={"router": ("a=1",)}), "router"),
    ],
)
def test_a_wrong_description_is_refused_with_a_sentence_that_names_the_fault(spec, word):
    with pytest.raises(ConfigError, match=word):
        check_spec(spec)


def test_no_prefill_workers_are_fine_where_decode_workers_compute_prompts():
    check_spec(ClusterSpec(prefill=0, prefill_mode="local"))


@pytest.mark.parametrize(("cores", "workers", "threads"), [(2, 2, 1), (2, 4, 1), (16, 3, 5), (1, 0, 1)])
def test_threads_are_shared_and_never_less_than_one(cores, workers, threads):
    assert threads_per_worker(cores, workers) == threads


def test_only_decode_workers_get_a_prefill_section():
    common = {"run_dir": Path("r"), "model_dir": Path("m"), "gateways": ["h:1"], "threads": 1}
    spec = ClusterSpec(prefill_mode="auto", transfer="tcp")
    decode = worker_config(spec, role="decode", worker_id="decode-1", **common)
    prefill = worker_config(spec, role="prefill", worker_id="prefill-1", **common)
    assert decode["prefill"] == {"mode": "auto"}
    assert "prefill" not in prefill
    assert decode["transfer"] == {"transports": ["tcp"]}


def test_a_gateway_shares_its_socket_and_knows_the_place_of_its_successor():
    config = gateway_config(
        ClusterSpec(),
        gateway_id="g",
        run_dir=Path("r"),
        model_dir=Path("m"),
        http_port=1,
        listener_fd=7,
        membership_port=2,
        sibling="h:3",
    )
    assert (config["http"]["port"], config["membership"]["port"]) == (1, 2)
    assert config["http"]["listener_fd"] == 7
    assert config["membership"]["siblings"] == ["h:3"]


def revision(spec, model="m", number=1):
    return Revision(number=number, spec=spec, model_dir=Path(model))


def test_a_new_setting_replaces_the_old_one_of_its_key_only():
    spec = with_sets(ClusterSpec(sets={"all": ("a=1", "b=2")}), {"all": ["a=3"], "gateway": ["c=4"]})
    assert spec.sets == {"all": ("b=2", "a=3"), "gateway": ("c=4",)}


@pytest.mark.parametrize(
    ("sets", "model", "roles"),
    [
        ({"decode": ["x=1"]}, "m", {"decode"}),
        ({"all": ["x=1"]}, "m", {"prefill", "decode"}),
        ({"gateway": ["x=1"]}, "m", {"gateway"}),
        ({}, "m", {"gateway", "prefill", "decode", "controller"}),
        ({}, "other", {"gateway", "prefill", "decode", "controller"}),
    ],
)
def test_a_rollout_replaces_what_differs_or_everything(sets, model, roles):
    assert changed_roles(revision(ClusterSpec()), revision(with_sets(ClusterSpec(), sets), model)) == roles


def test_overrides_for_all_reach_workers_before_their_own_and_never_the_gateway():
    spec = ClusterSpec(sets={"all": ("engine.num_pages=64",), "decode": ("engine.num_pages=128",), "gateway": ("x=1",)})
    assert overrides(spec, "decode") == ["engine.num_pages=64", "engine.num_pages=128"]
    assert overrides(spec, "prefill") == ["engine.num_pages=64"]
    assert overrides(spec, "gateway") == ["x=1"]


def test_new_workers_take_the_lowest_free_number():
    assert next_worker_id("decode", {"decode-1", "decode-3", "prefill-2"}) == "decode-2"


def test_the_highest_numbers_of_the_pool_leave_first():
    ids = ["decode-1", "decode-2", "decode-10", "prefill-1"]
    assert choose_leaving("decode", ids, 2) == ["decode-10", "decode-2"]
    assert choose_leaving("decode", ids, 0) == []


def test_workers_take_their_devices_by_turn_and_settings_choose_among_transports():
    common = {"run_dir": Path("r"), "model_dir": Path("m"), "gateways": ["h:1"], "threads": 1}
    spec = ClusterSpec(devices={"decode": ("cuda:1", "cuda:2")})

    def device(role, number):
        return worker_config(spec, role=role, worker_id=f"{role}-{number}", **common)["model"]["device"]

    assert [device("decode", number) for number in (1, 2, 3)] == ["cuda:1", "cuda:2", "cuda:1"]
    assert device("prefill", 1) == "cpu"
    # What auto stands for is the worker's to say: it depends on where its pool is.
    assert worker_config(spec, role="decode", worker_id="decode-1", **common)["transfer"] == {"transports": ["auto"]}


def test_a_gateway_gets_no_port_that_is_taken(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(launcher, "MEMBERSHIP_PORTS", [taken.getsockname()[1], 20_001, 29_999])
        assert set(launcher.free_addresses("127.0.0.1")) == {"127.0.0.1:20001", "127.0.0.1:29999"}
