"""A real Kubernetes on one machine, each node in a network namespace of its own; for Debian 12 as root, in tests only.

The control plane is at 10.77.0.1 in namespace tdl-cp, node i at 10.77.0.(i+1) with its own containerd, kubelet and
kube-proxy, and pods in 10.244.(i+1).0/24. The machine's own network is not touched; `down` ends recorded processes only.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from deploy.lab.settings import cni, containerd_toml, control_plane, kubeconfig, kubelet, node_programs

NET, PREFIX = "10.77.0", "tdl-"
READY_S = 180.0
ROOT = Path(__file__).parents[2]


def sh(*command: str, check: bool = True) -> str:
    """Run a command and return what it printed; raises CalledProcessError with its complaint."""
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    if check and done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done.stdout.strip()


def wait_for(condition: Callable[[], object], timeout_s: float, what: str) -> float:
    """Poll until true and return the seconds it took; raises TimeoutError."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > timeout_s:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.1)
    return time.monotonic() - begun


class Lab:
    """One cluster of namespaces; `state` is a folder that `down` removes, and by which another process may take it over."""

    def __init__(self, state: Path, binaries: Path, nodes: Sequence[str]) -> None:
        self.state = state
        self.binaries = binaries.resolve()  # its programs run elsewhere
        self.nodes = list(nodes)
        self._names = ["cp", *nodes]
        self._pids: list[tuple[str, int]] = []
        self._before: set[str] = set()
        if (state / "pids.json").exists():
            self._pids, before = json.loads((state / "pids.json").read_text())
            self._before = set(before)

    def address(self, node: str) -> str:
        """Return a node's address."""
        return f"{NET}.{self._names.index(node) + 1}"

    def kubectl(self, *arguments: str, check: bool = True) -> str:
        """Run kubectl inside the control plane's namespace."""
        return sh("ip", "netns", "exec", f"{PREFIX}cp", "kubectl", "--kubeconfig", str(self.state / "kubeconfig"), *arguments, check=check)  # fmt: skip

    def ctr(self, node: str, *arguments: str, check: bool = True) -> str:
        """Run containerd's client for one node."""
        return sh("ctr", "-a", str(self.state / node / "c.sock"), "-n", "k8s.io", *arguments, check=check)

    def up(self, images: Sequence[Path]) -> dict[str, float]:
        """Start everything; returns seconds after the start of each phase."""
        begun, took = time.monotonic(), {}
        self.state.mkdir(parents=True)
        (self.state / "pki").mkdir()
        self._network()
        sh("openssl", "genrsa", "-out", str(self.state / "pki/sa.key"), "2048")
        (self.state / "tokens.csv").write_text("admintoken,admin,admin,system:masters\n")
        (self.state / "kubeconfig").write_text(json.dumps(kubeconfig(f"https://{NET}.1:6443")))
        table = control_plane(self.binaries, self.state, f"{NET}.1")
        for name in ("etcd", "apiserver"):
            self._spawn("cp", name, table[name])
        wait_for(lambda: self.kubectl("get", "--raw", "/readyz", check=False) == "ok", READY_S, "the API server")
        took["apiserver_ready_s"] = time.monotonic() - begun
        for name in ("controllers", "scheduler"):
            self._spawn("cp", name, table[name])
        self._spawn("cp", "names", [sys.executable, "-m", "deploy.lab.names", "--host", f"{NET}.1", "--kubeconfig", str(self.state / "kubeconfig")])  # fmt: skip
        for node in self.nodes:
            self._node_files(node)
            self._spawn(node, f"{node}-containerd", ["containerd", "-c", str(self.state / node / "containerd.toml")])
        for node in self.nodes:
            wait_for((self.state / node / "c.sock").exists, READY_S, f"containerd of {node}")
            for image in images:
                self.ctr(node, "images", "import", str(image))
        took["images_imported_s"] = time.monotonic() - begun
        for node in self.nodes:
            table = node_programs(self.binaries, self.state, self.address(node), node)
            self._spawn(node, f"{node}-kubelet", table["kubelet"])
            self._spawn(node, f"{node}-proxy", table["proxy"])
        wait_for(lambda: self.ready_nodes() == set(self.nodes), READY_S, "the nodes")
        took["nodes_ready_s"] = time.monotonic() - begun
        return {name: round(seconds, 1) for name, seconds in took.items()}

    def ready_nodes(self) -> set[str]:
        """Return the names of nodes that Kubernetes holds for ready."""
        lines = self.kubectl("get", "nodes", "--no-headers", check=False).splitlines()
        return {line.split()[0] for line in lines if " Ready " in line}

    def cut(self, node: str, *, is_up: bool) -> None:
        """Unplug a node's cable, or plug it in again."""
        sh("ip", "-n", f"{PREFIX}sw", "link", "set", f"tv-{node}", "up" if is_up else "down")

    def down(self) -> None:
        """End the recorded processes, kubelets before containers, and remove namespaces, mounts and files."""
        self._end(lambda name: not name.endswith("-containerd"))
        for node in self.nodes:
            if (self.state / node / "c.sock").exists():
                for task in self.ctr(node, "tasks", "ls", "-q", check=False).split():
                    self.ctr(node, "tasks", "rm", "-f", task, check=False)
        self._end(lambda _: True)
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in sorted((m for m in mounts if m.startswith(str(self.state))), reverse=True):
            sh("umount", "-l", mount, check=False)
        for name in [*self._names, "sw"]:
            sh("ip", "netns", "del", PREFIX + name, check=False)
        for name in self._pod_namespaces() - self._before:
            sh("ip", "netns", "del", name, check=False)
        shutil.rmtree(self.state, ignore_errors=True)

    def _pod_namespaces(self) -> set[str]:
        return {line.split()[0] for line in sh("ip", "netns", "list").splitlines() if line.startswith("cni-")}

    def _end(self, chosen: Callable[[str], bool]) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for name, pid in reversed(self._pids):
                if chosen(name):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            time.sleep(1.0)

    def _spawn(self, node: str, name: str, command: Sequence[str]) -> None:
        with (self.state / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{PREFIX}{node}", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=ROOT if name == "names" else self.state,
            )
        self._pids.append((name, process.pid))
        (self.state / "pids.json").write_text(json.dumps([self._pids, sorted(self._before)]))

    def _network(self) -> None:
        self._before = self._pod_namespaces()
        switch = f"{PREFIX}sw"
        sh("ip", "netns", "add", switch)
        sh("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        sh("ip", "-n", switch, "link", "set", "br0", "up")
        for name in self._names:
            space = PREFIX + name
            sh("ip", "netns", "add", space)
            sh("ip", "link", "add", f"tv-{name}", "netns", switch, "type", "veth", "peer", "name", "eth0", "netns", space)  # fmt: skip
            sh("ip", "-n", switch, "link", "set", f"tv-{name}", "master", "br0", "up")
            sh("ip", "-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            sh("ip", "-n", space, "link", "set", "eth0", "up")
            sh("ip", "-n", space, "link", "set", "lo", "up")
            sh("ip", "netns", "exec", space, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for name in self._names:
            if name != "cp":
                sh("ip", "-n", PREFIX + name, "route", "add", "default", "via", f"{NET}.1")
            for number, other in enumerate(self._names, 1):
                if other not in {name, "cp"}:
                    sh("ip", "-n", PREFIX + name, "route", "add", f"10.244.{number}.0/24", "via", f"{NET}.{number}")

    def _node_files(self, node: str) -> None:
        folder = self.state / node
        (folder / "cni").mkdir(parents=True)
        number = self._names.index(node) + 1
        (folder / "cni/10.conflist").write_text(json.dumps(cni(folder, f"10.244.{number}.0/24")))
        (folder / "containerd.toml").write_text(containerd_toml(folder, self.address(node)))
        (folder / "kubelet.yaml").write_text(json.dumps(kubelet(self.address(node), f"{NET}.1")))
