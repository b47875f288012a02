"""T5: what our manifests show on a real Kubernetes in namespaces, under load; run by `kubernetes_lab`.

Scales, drains, rolls, evicts and cuts off; every stream's text is compared with what it must be. The same exits without
a drain must cut streams: else the proof would prove nothing.
"""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path

from core.clock import SystemClock
from deploy.actuators.kubectl_api import KubectlApi
from deploy.actuators.kubernetes import DEPLOYMENTS, KubernetesActuator, is_ready
from deploy.cluster_description import PortsPart
from deploy.lab.kubernetes import PREFIX, Lab, sh, wait_for
from deploy.validate_k8s import build
from deploy.validate_network import INSIDE, needed_pairs
from tests.deploy import kubernetes_pairs
from tests.deploy.overlays import kubectl
from tests.deploy.pod_phases import phases
from tests.deploy.test_docs_k8s import blocks

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = "tandem"
ROLLED_S = 240.0
SEEN_S = 300.0
MANY = 48
"""Streams at a time where some must be cut: each pod has some then."""


class Proof:
    """One run on one lab; `facts` becomes the record."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.facts: dict[str, object] = {}
        kubectl = ("ip", "netns", "exec", f"{PREFIX}cp", "kubectl", "--kubeconfig", str(lab.state / "kubeconfig"))
        self.api = KubectlApi(NAMESPACE, kubectl)
        self.actuator = KubernetesActuator(
            self.api,
            SystemClock(),
            namespace=NAMESPACE,
            remove_timeout_s=120.0,
            drain=self.api.drain,
        )
        self.url = ""
        self.overlay = lab.state / "my-cluster"

    def note(self, name, value):
        self.facts[name] = value
        print(f"{time.strftime('%H:%M:%S')} {name}: {json.dumps(value)}", flush=True)

    def pods(self, role):
        query = {"labelSelector": f"tandem/role={role}"}
        return [p for p in self.api.get("api/v1:pods", query)["items"] if not p["metadata"].get("deletionTimestamp")]

    def ready(self, role):
        return [p for p in self.pods(role) if is_ready(p)]

    def names(self, role):
        return sorted(p["metadata"]["name"] for p in self.pods(role))

    def has(self, role, count, timeout_s=ROLLED_S):
        return round(
            wait_for(lambda: len(self.ready(role)) == len(self.pods(role)) == count, timeout_s, f"{count} {role}"), 1
        )

    def apply(self):
        self.lab.kubectl("apply", "-f", str(self.lab.state / "manifests.json"))
        for role, count in (("gateway", 2), ("prefill", 2), ("decode", 2), ("controller", 1)):
            self.rolled(role)
            self.has(role, count, SEEN_S)

    def rolled(self, role):
        self.lab.kubectl("-n", NAMESPACE, "rollout", "status", f"deployment/{role}", f"--timeout={SEEN_S:g}s")

    def restart(self, role):
        self.lab.kubectl("-n", NAMESPACE, "rollout", "restart", f"deployment/{role}")
        self.rolled(role)
        self.has(role, 2)

    def install(self):
        self.lab.kubectl("create", "namespace", NAMESPACE, check=False)
        (self.lab.state / "secret").write_text(secrets.token_hex(16))
        self.lab.kubectl("-n", NAMESPACE, "create", "secret", "generic", "tandem-cluster", f"--from-file=secret={self.lab.state / 'secret'}", check=False)  # fmt: skip
        docs = build(kubernetes_pairs.overlay(self.overlay), kubectl())
        (self.lab.state / "manifests.json").write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": docs}))
        begun = time.monotonic()
        self.apply()
        self.find()
        ready_s = time.monotonic() - begun
        answer = self.ask(self.url)
        assert answer["choices"][0]["finish_reason"], answer
        self.note("A1 apply to ready, to first answer (s)", [round(ready_s, 1), round(time.monotonic() - begun, 1)])
        self.note("A1 phases (s)", {role: phases(self.pods(role)) for role in ("gateway", "prefill", "decode")})

    def find(self):  # where clients connect
        self.url = f"http://{self.api.get('api/v1:services/gateway')['spec']['clusterIP']}"

    def ask(self, url, timeout_s=30):
        body = json.dumps({"model": "scripted", "prompt": "The quick brown fox", "max_tokens": 8})
        text = sh(*self.on("w0"), "curl", "-s", "-m", str(timeout_s), "-H", "content-type: application/json", "-d", body, f"{url}/v1/completions")  # fmt: skip
        return json.loads(text)

    def line(self, command):
        """A command line as a reader would type it, for a program that starts it."""
        return ["bash", "-euo", "pipefail", "-c", command]

    def surroundings(self):
        """Where such a command runs: in the lab's folder, with a kubectl that reaches the lab and our own `tandem`."""
        programs = self.lab.state / "bin"
        programs.mkdir(exist_ok=True)
        wrapper = programs / "kubectl"
        wrapper.write_text(f'#!/bin/sh\nexec ip netns exec {PREFIX}cp {shutil.which("kubectl")} --kubeconfig {self.lab.state}/kubeconfig "$@"\n')  # fmt: skip
        wrapper.chmod(0o755)
        path = f"{programs}:{ROOT}/.venv/bin:{os.environ['PATH']}"
        return {"cwd": self.lab.state, "env": {**os.environ, "PATH": path}, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}  # fmt: skip

    def cli(self, command):
        """Run such a command to its end."""
        return subprocess.run(self.line(command), **self.surroundings(), check=False)

    def on(self, node):
        return ("nsenter", f"--net=/run/netns/{PREFIX}{node}")

    @contextlib.contextmanager
    def load(self, name, url=None, concurrency=4, lanes=()):
        """Streams from node w0 as long as the body runs; notes how many there were and what was wrong with them."""
        stop = self.lab.state / f"stop-{len(self.facts)}"
        begun = stop.with_suffix(".begun")
        command = [*self.on("w0"), sys.executable, "-m", "tests.deploy.stream_load", url or self.url, str(stop), str(concurrency), *map(str, lanes)]  # fmt: skip
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        wait_for(begun.exists, 120, "the load")
        time.sleep(3)
        result = {}
        try:
            yield result
        finally:
            time.sleep(2)
            stop.touch()
            result |= json.loads(process.communicate(timeout=240)[0])
            self.note(name, {**result, "faults": len(result["faults"]), "first faults": result["faults"][:3]})

    # What is shown.

    def rights(self):
        """The controller's account may do what it needs and nothing else."""
        account = f"--as=system:serviceaccount:{NAMESPACE}:tandem-controller"
        asked = {
            "update deployments/scale decode": ("update", "deployments.apps/decode", "--subresource=scale"),
            "patch pods": ("patch", "pods"),
            "update its lease": ("update", "leases.coordination.k8s.io/tandem-controller"),
            "NOT update deployments/scale gateway": ("update", "deployments.apps/gateway", "--subresource=scale"),
            "NOT update deployments": ("update", "deployments.apps/decode"),
            "NOT delete pods": ("delete", "pods"),
            "NOT read secrets": ("get", "secrets"),
        }
        found = {
            name: self.lab.kubectl("auth", "can-i", *verb, "-n", NAMESPACE, account, check=False).splitlines()[-1]
            for name, verb in asked.items()
        }
        self.note("A15 rights of the controller", found)
        assert all((answer == "no") == name.startswith("NOT") for name, answer in found.items()), found

    def scale(self):
        """A2: each pool alone, both directions, under load; the other one is not touched."""
        took = {}
        with self.load("A2 streams while each pool is scaled up and down") as result:
            for role, other in (("decode", "prefill"), ("prefill", "decode")):
                untouched, begun = self.names(other), time.monotonic()
                asyncio.run(self.actuator.ensure(role, 3, fence=0))
                self.has(role, 3)
                took[f"{role} 2 -> 3"] = round(time.monotonic() - begun, 1)
                victim = self.names(role)[0]
                begun = time.monotonic()
                asyncio.run(self.actuator.remove(victim, fence=0))
                took[f"{role} 3 -> 2"] = round(time.monotonic() - begun, 1)
                assert victim not in self.names(role), f"A13: {victim} drained, another one was removed"
                assert self.names(other) == untouched, f"{other} was touched"
        self.note("A2 seconds", took)
        assert result["faults"] == []

    def victims(self):
        """A13: the pod that drained is the one that goes, whichever it is."""
        asyncio.run(self.actuator.ensure("decode", 4, fence=0))
        self.has("decode", 4)
        chosen = [self.names("decode")[i] for i in (0, 2)]
        for victim in chosen:
            before = set(self.names("decode"))
            asyncio.run(self.actuator.remove(victim, fence=0))
            assert before - set(self.names("decode")) == {victim}
        self.note("A13 drained and removed", f"{len(chosen)} of {len(chosen)}")

    def rollout(self):
        """A4: workers, then gateways, are replaced under load."""
        for roles, name in ((("decode", "prefill"), "workers"), (("gateway",), "gateways")):
            begun = time.monotonic()
            with self.load(f"A4 streams while {name} are replaced") as result:
                for role in roles:
                    self.restart(role)
            self.note(f"A4 seconds for {name}", round(time.monotonic() - begun, 1))
            assert result["faults"] == []

    def eviction(self):
        """A14: a node is drained under load; the budgets hold."""
        least = {"gateway": 9, "prefill": 9, "decode": 9}
        with self.load("A14 streams while a node is drained") as result:
            command = ["drain", "w1", "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=240s"]
            api = ("ip", "netns", "exec", f"{PREFIX}cp", "kubectl", "--kubeconfig", str(self.lab.state / "kubeconfig"))
            begun = time.monotonic()
            draining = subprocess.Popen([*api, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while draining.poll() is None:
                least = {role: min(count, len(self.ready(role))) for role, count in least.items()}
                time.sleep(0.5)
            took = time.monotonic() - begun
            assert draining.returncode == 0
            for role in least:
                self.has(role, 2)
        self.lab.kubectl("uncordon", "w1")
        self.note("A14 drained in (s), least that were ready", [round(took, 1), least])
        assert result["faults"] == []
        assert min(least.values()) >= 1

    def spread(self):
        """One pod of each role on each node: 1.20 counts pods of an older revision when it spreads."""
        for role in ("gateway", "prefill", "decode"):
            here = self.pods(role)
            nodes = {pod["spec"]["nodeName"] for pod in here}
            if len(nodes) == 1:
                (full,) = nodes
                self.lab.kubectl("cordon", full)
                self.lab.kubectl("-n", NAMESPACE, "delete", "pod", here[0]["metadata"]["name"], "--wait=false")
                self.has(role, 2)
                self.lab.kubectl("uncordon", full)

    def cut_off(self):
        """A6/A7: a node without its cable: no new traffic goes there, what it held is replaced, it comes back."""
        self.spread()
        where = {
            role: sorted(p["spec"]["nodeName"] for p in self.pods(role)) for role in ("gateway", "prefill", "decode")
        }
        self.note("A7 where pods are", where)
        (gateway,) = (p for p in self.pods("gateway") if p["spec"]["nodeName"] == "w0")
        address = gateway["status"]["podIP"]
        lost = {
            p["metadata"]["name"] for r in ("prefill", "decode") for p in self.pods(r) if p["spec"]["nodeName"] == "w1"
        }
        assert lost, "no worker is on the node that is to be cut off"
        self.lab.cut("w1", is_up=False)
        begun = time.monotonic()
        unknown = wait_for(lambda: not lost & self.workers_at(address), 20, "the leases")
        self.note("A7 the other node's gateway knows the lost workers no more after (s)", round(unknown, 2))
        answer = self.ask(f"http://{address}:8000")
        self.note("A7 first answer after the cut (s)", round(time.monotonic() - begun, 2))
        assert answer["choices"][0]["finish_reason"], answer
        for role in ("decode", "prefill"):
            wait_for(
                lambda role=role: len([p for p in self.ready(role) if p["spec"]["nodeName"] == "w0"]) >= 2, SEEN_S, role
            )
        self.note("A7 replaced after (s)", round(time.monotonic() - begun, 1))
        self.lab.cut("w1", is_up=True)
        wait_for(lambda: self.lab.ready_nodes() == {"w0", "w1"}, 60, "the node")
        for role in ("gateway", "prefill", "decode"):
            self.has(role, 2)
        answer = self.ask(self.url)
        assert answer["choices"][0]["finish_reason"], answer
        self.note("A7 whole again after (s)", round(time.monotonic() - begun, 1))

    def workers_at(self, address):
        """Ids of the workers that a gateway routes to, from its health listener."""
        text = sh(*self.on("w0"), "curl", "-s", "-m", "2", f"http://{address}:9400/statusz", check=False)
        return {w["id"] for w in json.loads(text).get("workers", []) if w.get("routable")} if text else set()

    def documented(self):
        """A24: the page's commands that need a cluster, as they stand, in the namespace that is there already."""
        lines = [line for block in blocks("cluster") for line in block.splitlines() if " create " not in line]
        for line in lines:
            done = self.cli(line)
            assert done.returncode == 0, f"{line}: {done.stderr}"
        self.has("decode", 2)
        self.note("A24 commands of the page", lines)

    def naive(self):
        """The same pods leave without a drain: streams must be cut, else the proofs of A2 and A4 prove nothing.

        The gateways do not resume either: a stream would outlive the loss of its worker.
        """
        path = f"{DEPLOYMENTS}/gateway"
        args = self.api.get(path)["spec"]["template"]["spec"]["containers"][0]["args"]
        container = {"name": "gateway", "args": [*args, "--set", "retries.max_crashes=1"]}
        patch = {"spec": {"template": {"spec": {"containers": [container]}}}}
        self.lab.kubectl("-n", NAMESPACE, "patch", "deployment", "gateway", "-p", json.dumps(patch))
        self.rolled("gateway")
        self.has("gateway", 2)
        with self.load("A2 negative control: streams while decode is scaled 2 -> 1 without a drain", concurrency=MANY) as scaled:  # fmt: skip
            self.killed("decode", ("scale", "deployment/decode", "--replicas=1"), leave=1, stay=1)
        with self.load("A4 negative control: streams while gateways are replaced without a drain", concurrency=MANY) as replaced:  # fmt: skip
            self.killed("gateway", ("rollout", "restart", "deployment/gateway"), leave=2, stay=2)
        self.apply()
        assert scaled["faults"], "a decode worker without a drain cut nothing: the proof of A2 cannot fail"
        assert replaced["faults"], "gateways without a drain cut nothing: the proof of A4 cannot fail"

    def killed(self, role, change, leave, stay):
        """Kill (-9) pods that are to leave while streams are on them, then change the Deployment."""
        for pod in self.ready(role)[:leave]:
            self.lab.ctr(pod["spec"]["nodeName"], "tasks", "kill", "-s", "SIGKILL", container_of(pod))
        self.lab.kubectl("-n", NAMESPACE, *change)
        self.rolled(role)
        self.has(role, stay)

    def pairs(self):
        """A16: the connections that pods really have under load are those that the network policies allow."""
        roles = {p["status"]["podIP"]: p["metadata"]["labels"]["tandem/role"] for r in INSIDE for p in self.ready(r)}
        seen = set()
        with self.load("A16 streams while connections are listed"):
            for role in INSIDE:
                for pod in self.ready(role):
                    for line in self.sockets(pod):
                        local, peer = line.split()[2:4]
                        source = roles.get(peer.rpartition(":")[0].removeprefix("[::ffff:").rstrip("]"))
                        if source is not None:
                            seen.add((source, role, int(local.rpartition(":")[2])))
        needed = {pair for pair in needed_pairs(PortsPart()) if {*pair[:2]} <= {*INSIDE}}
        ports = {port for *_, port in needed}
        used = {pair for pair in seen if pair[2] in ports}
        self.note("A16 pairs in use", sorted(used))
        self.note("A16 allowed and not seen", sorted(needed - used))
        assert used <= needed, sorted(used - needed)

    def sockets(self, pod):
        """Established TCP connections inside a pod's network namespace."""
        tasks = dict(line.split()[:2] for line in self.lab.ctr(pod["spec"]["nodeName"], "tasks", "ls").splitlines()[1:])
        return sh("nsenter", "-t", tasks[container_of(pod)], "-n", "ss", "-Htn", "state", "established").splitlines()

    def counted(self, *names):
        """Counters of the workers, summed over all of them."""
        total = {}
        for role in ("prefill", "decode"):
            for pod in self.ready(role):
                text = sh(*self.on("w0"), "curl", "-s", "-m", "3", f"http://{pod['status']['podIP']}:9400/metrics")
                for line in text.splitlines():
                    if (name := line.split("{")[0].split()[0]) in names:
                        total[name] = total.get(name, 0) + float(line.split()[-1])
        return total

    def transferred(self):
        """A18: KV really moved between pods."""
        landed, again = "tandem_transfer_landed_bytes_total", "tandem_recomputed_tokens_total"
        total = self.counted(landed, again)
        self.note("A18 bytes landed by tcp, tokens computed again", total)
        assert total[landed] > total[again] == 0

    def revisions(self):
        """A11: other weights pair by pair, aborted, and as a control pool after pool back to those of the overlay."""
        kubernetes_pairs.show(self)


def container_of(pod):
    """Id of a pod's container; empty before there is one."""
    return next(iter(pod["status"].get("containerStatuses", [])), {}).get("containerID", "").partition("//")[2]


CHECKS = (
    "rights",
    "scale",
    "transferred",
    "pairs",
    "victims",
    "rollout",
    "naive",
    "revisions",
    "eviction",
    "cut_off",
    "documented",
)
