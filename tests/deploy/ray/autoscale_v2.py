"""By hand: Ray's autoscaler (v2, with its fake nodes) brings nodes for our supervisors and takes empty ones away.

unshare -p -n -u -f --mount-proc --kill-child .venv/bin/python -m tests.deploy.ray.autoscale_v2 --record ray_autoscaler
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ray
from ray.autoscaler._private import fake_multi_node
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

from benchmarks.record import write_record
from deploy.local.spec import ClusterSpec
from deploy.ray import client
from deploy.ray.plan import Needs, RayPlan
from tests.deploy.ray.inside_ray import alone_on_loopback
from tests.fakes.live_cluster import wait_for

SMALL = {"object_store_memory": 80 * 2**20}
ROLES = ("prefill", "decode")
WAIT_S = 240


def description() -> dict:
    """Two kinds of nodes, each with room for one worker, at least one of each."""
    workers = {
        role: {
            "resources": {"CPU": 1, role: 1, **SMALL},
            "node_config": {},
            "labels": {"tandem/domain": "a"},
            "min_workers": 1,
            "max_workers": 2,
        }
        for role in ROLES
    }
    head = {"resources": {"CPU": 4, "gateway": 2}, "node_config": {}, "max_workers": 0}
    lists = ("head_setup_commands", "worker_setup_commands", "setup_commands", "initialization_commands")
    lists += ("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude")
    return {
        "cluster_name": "fake",
        "max_workers": 4,
        "idle_timeout_minutes": 0.2,
        "provider": {"type": "fake_multinode", "launch_multiple": True, "head_node_id": FAKE_HEAD_NODE_ID},
        "auth": {},
        "head_node_type": "ray.head.default",
        "available_node_types": {**workers, "ray.head.default": head},
        "upscaling_speed": 1,
        "docker": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        "rsync_filter": [],
        "head_node": {},
        "worker_nodes": {},
        **{name: [] for name in lists},
    }


def start_head(folder: Path) -> None:
    """The wheel lacks a file that the fake provider reads: it is laid over the package in this mount namespace only."""
    package = Path(fake_multi_node.__file__).parent
    shutil.copytree(package, folder / "package")
    config = folder / "config.json"
    config.write_text(json.dumps(description()))
    (folder / "package" / "example.yaml").write_text(json.dumps(description()))
    subprocess.run(["mount", "--bind", str(folder / "package"), str(package)], check=True)
    command = [
        str(Path(sys.executable).with_name("ray")),
        "start",
        "--head",
        "--num-cpus=4",
        "--resources",
        '{"gateway": 2}',
    ]
    command += [f"--autoscaling-config={config}", f"--object-store-memory={SMALL['object_store_memory']}"]
    own = {"RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID, "RAY_FAKE_CLUSTER": "1"}
    own |= {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID, "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    own |= {"RAY_AUTH_MODE": "disabled", "RAY_raylet_start_wait_time_s": "400", "RAY_USAGE_STATS_ENABLED": "0"}
    subprocess.run([*command, "--include-dashboard=false"], check=True, env={**os.environ, **own})
    os.environ["RAY_AUTH_MODE"] = "disabled"


def nodes() -> dict[str, int]:
    alive = [n for n in ray.nodes() if n["Alive"]]
    return {role: sum(1 for n in alive if n["Resources"].get(role)) for role in ROLES}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", default="")
    options = parser.parse_args()
    assert os.getpid() < 50, "run me in namespaces of my own, see above"
    alone_on_loopback()
    seconds: dict[str, float] = {}

    def timed(what: str, begun: float) -> None:
        seconds[what] = round(time.monotonic() - begun, 1)
        print(what, seconds[what], flush=True)

    with tempfile.TemporaryDirectory(prefix="tr", dir="/tmp") as folder:
        os.environ |= {"HOME": folder, "RAY_TMPDIR": folder}
        begun = time.monotonic()
        start_head(Path(folder))
        timed("head", begun)
        needs = {role: Needs(cpus=0.5) for role in ROLES}
        spec = ClusterSpec(model="scripted", transfer="tcp", drain_s=10.0)
        with client.connected("auto"):
            wait_for(lambda: nodes() == {"prefill": 1, "decode": 1}, WAIT_S, "no first nodes")
            timed("one node of each kind", begun)
            begun = time.monotonic()
            client.start(RayPlan(spec=spec, needs=needs), print)
            timed("cluster serves", begun)
            begun = time.monotonic()
            status = client.ask("default", {"command": "scale", "pools": {"prefill": 2}}, print)
            assert nodes() == {"prefill": 2, "decode": 1}, nodes()
            assert sum(p["state"] == "ready" for p in status["processes"]) == 4
            timed("prefill 1 -> 2, with the node that it needed", begun)
            begun = time.monotonic()
            client.ask("default", {"command": "scale", "pools": {"prefill": 1}}, print)
            timed("prefill 2 -> 1", begun)
            wait_for(lambda: nodes() == {"prefill": 1, "decode": 1}, WAIT_S, "the empty node stays")
            timed("the empty node is gone", begun)
            client.end("default", 5.0, print)
        if options.record:
            note = "Ray's autoscaler v2 with its fake nodes; idle time-out 12 s; 2 CPU cores shared with other work"
            write_record(options.record, {"seconds": seconds}, note=note)
    os._exit(0)  # the namespace ends with us, and all of Ray in it


if __name__ == "__main__":
    main()
