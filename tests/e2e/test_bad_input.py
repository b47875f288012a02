"""Bad input gives one plain sentence and the right status or exit code (issue point 7)."""

import json
import re
import shutil
import socket
import subprocess
import sys

import httpx
import pytest

from engine.models.builtin import prepare_builtin
from tests.fakes.live_cluster import ROOT, complete, running_cluster

pytestmark = [pytest.mark.cluster]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    flags = ("--set", "all:engine.num_pages=64", "--set", "all:engine.page_tokens=16")
    with running_cluster(tmp_path_factory.mktemp("bad"), *flags) as running:
        yield running


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (b"{not json", 400, "JSON"),
        (b"[]", 400, "object"),
        (json.dumps({"model": "scripted"}).encode(), 400, "prompt"),
        (json.dumps({"model": "scripted", "prompt": "x", "max_tokens": "many"}).encode(), 400, "max_tokens"),
        (json.dumps({"model": "scripted", "prompt": "x", "temperature": -1}).encode(), 400, "temperature"),
        (json.dumps({"model": "nope", "prompt": "x"}).encode(), 404, "nope"),
        (json.dumps({"model": "scripted", "prompt": "x" * 5000}).encode(), 400, "5000"),
        (json.dumps({"model": "scripted", "prompt": ""}).encode(), 400, "prompt"),
    ],
)
def test_a_bad_request_gets_a_status_and_a_sentence(cluster, content, status, words):
    response = httpx.post(
        cluster.base_url + "/v1/completions", content=content, headers={"content-type": "application/json"}, timeout=60
    )
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert words in error["message"] + str(error.get("param"))
    assert set(error) >= {"message", "type", "param", "code"}


def test_unknown_paths_and_methods_are_answered_in_the_same_shape(cluster):
    assert httpx.get(cluster.base_url + "/v2/nothing", timeout=60).status_code == 404
    response = httpx.get(cluster.base_url + "/v1/completions", timeout=60)
    assert response.status_code == 405
    assert "error" in response.json()


def test_unknown_fields_are_accepted_and_named(cluster):
    body = {"model": "scripted", "prompt": "x", "max_tokens": 1, "best_of_breed": True}
    response = httpx.post(cluster.base_url + "/v1/completions", json=body, timeout=60)
    assert response.status_code == 200
    assert "best_of_breed" in response.headers["x-tandem-ignored-fields"]


def test_the_cluster_still_answers_after_all_of_it(cluster):
    assert complete(cluster.base_url, {"model": "scripted", "prompt": "x", "max_tokens": 3})["choices"]


def up(tmp_path, *flags, timeout_s=170):
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", "up", "--run-dir", str(tmp_path / "run"), "--port", "0", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_a_port_in_use_is_a_preflight_failure(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = up(tmp_path, "--model", "scripted", "--port", str(port))
    assert run.returncode == 3
    assert str(port) in run.stderr
    assert "in use" in run.stderr


def test_an_unknown_model_is_named_with_what_exists(tmp_path):
    run = up(tmp_path, "--model", "no-such-model")
    assert run.returncode == 3
    assert "no-such-model" in run.stderr
    assert "scripted" in run.stderr


def test_a_corrupted_model_file_is_named(tmp_path):
    original = prepare_builtin("tiny-llama", tmp_path / "cache")
    broken = tmp_path / "broken"
    shutil.copytree(original, broken)
    weights = broken / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 0xFF
    weights.write_bytes(data)
    run = up(tmp_path, "--model", str(broken))
    assert run.returncode == 3
    assert "model.safetensors" in run.stderr


def test_too_little_shared_memory_says_sizes(tmp_path):
    run = up(tmp_path, "--model", "scripted", "--transfer", "shm", "--set", "all:engine.num_pages=60000000")
    assert run.returncode == 3
    # Each worker says it of its own memory, and the first one to fail is told.
    shared = r"needs [\d.]+ MiB of shared memory, but /dev/shm has [\d.]+ MiB free"
    anonymous = r"needs [\d.]+ MiB of memory, more than this host gives"
    assert re.search(f"{shared}|{anonymous}", run.stderr), run.stderr
    assert "lower engine.num_pages" in run.stderr


def test_a_setting_that_does_not_exist_is_named(tmp_path):
    run = up(tmp_path, "--model", "scripted", "--set", "decode:engine.num_pagez=1")
    assert run.returncode == 3
    assert "num_pagez" in run.stderr


def test_a_second_cluster_in_the_same_directory_is_refused(cluster):
    run = cluster.cli("up", "--model", "scripted", "--port", "0")
    assert run.returncode == 3
    assert "already runs" in run.stderr
