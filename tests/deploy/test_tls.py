"""Operator commands on a cluster whose processes talk mutual TLS: status, scale, drain, rollout, and the controller."""

import json

import pytest

from tests.fakes.certificates import Authority
from tests.fakes.live_cluster import running_cluster, stream_text, wait_for
from tests.fakes.truth import scripted_text

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(400)]


def flags_of(authority):
    """The settings by which every process of a cluster shows a certificate and asks for one."""
    certificate, key = authority.issue("process", "tandem")
    files = {"certificate": certificate, "key": key, "authority": authority.path}
    places = {"all": "worker.tls", "gateway": "tls", "controller": "controller.tls"}
    sets = [f"{role}:{section}.{name}={path}" for role, section in places.items() for name, path in files.items()]
    return [word for value in sets for word in ("--set", value)]


def test_operator_commands_work_where_every_connection_is_mutual_tls(tmp_path):
    flags = [*flags_of(Authority(tmp_path)), "--autoscale", "--set", "controller:controller.advisory=true"]
    with running_cluster(tmp_path, *flags) as cluster:
        body = {"model": "scripted", "prompt": "hello", "max_tokens": 20, "temperature": 0}

        def well():
            answer = stream_text(cluster.base_url, body)
            return answer["text"] == scripted_text("hello", 20)

        assert well()
        journal = cluster.run_dir / "controller-1.decisions.jsonl"

        def reads():
            lines = journal.read_text().splitlines() if journal.exists() else []
            return any(json.loads(line)["signals"]["age_s"] < 60 for line in lines)

        wait_for(reads, 60, "the controller reads no gateway")
        for command in (
            ("status",),
            ("scale", "decode=2"),
            ("drain", "decode-1"),
            ("rollout", "--set", "decode:engine.chunk_tokens=128"),
        ):
            done = cluster.cli(*command)
            assert done.returncode == 0, (command, done.stdout, done.stderr, cluster.logs())
            assert well(), command


def test_a_worker_with_a_certificate_of_another_authority_does_not_join(tmp_path):
    """Negative control: the cluster of above is closed, not only polite."""
    (tmp_path / "other").mkdir()
    stranger = flags_of(Authority(tmp_path / "other", "other"))
    theirs = [word for word in stranger if "prefill" not in word]
    with running_cluster(tmp_path, *flags_of(Authority(tmp_path))) as cluster:
        sets = [word.replace("all:", "decode:") for word in theirs if word.startswith("all:")]
        done = cluster.cli("rollout", *[w for value in sets for w in ("--set", value)], timeout_s=300)
        assert done.returncode == 3, done.stdout
        assert "went back" in done.stderr
