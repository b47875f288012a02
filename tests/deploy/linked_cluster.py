"""A cluster whose processes stand on hosts of their own, joined by cables that can be slow, lossy or cut."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time

import httpx

from core.clock import SystemClock
from core.config import native_environment, to_toml
from core.ids import fresh_incarnation
from core.rpc.admin import AdminClient
from core.rpc.proof import Proof
from deploy.actuators.api import Instance
from deploy.cluster_description import ROLES
from deploy.controller.meter import Meter, signals_of
from deploy.controller.poll import GatewayPoll
from deploy.lab.links import Switch
from deploy.lab.rules import rules, used
from deploy.local.spec import SERVICE_MODULES, ClusterSpec, worker_config
from deploy.validate_network import INSIDE
from tests.fakes.chaos import faults, storm
from tests.fakes.live_cluster import ROOT, wait_for

HTTP, MEMBERSHIP, HEALTH, WORKER, TRANSFER = 8000, 9500, 9400, 9600, 9700
"""Those of the manifests: network policies name them."""
START_S = 120
SECRET = "0123456789abcdef" * 2


class LinkedCluster:
    """One running cluster; use `linked_cluster`."""

    def __init__(self, switch, hosts, run_dir, model_dir, name):
        self.switch = switch
        self.roles = hosts
        self.run_dir = run_dir
        self.model_dir = model_dir
        self.name = name
        self.processes = {}

    def address(self, host):
        return self.switch.hosts[host].address

    @property
    def base_url(self):
        return f"http://{self.address('gateway')}:{HTTP}"

    def close_all_but(self, pairs):
        """Let the hosts of the cluster speak only as `pairs` say; before anything is started there."""
        addresses = {}
        for host, role in self.roles.items():
            addresses.setdefault(role, []).append(self.address(host))
        for host, role in self.roles.items():
            if role in INSIDE:
                self.run(host, "iptables-restore", text=rules(role, addresses, pairs))

    def connects(self, source, target, port):
        """Whether a host of one role can connect to one of another."""
        first = {role: host for host, role in reversed(self.roles.items())}

        def try_it():
            with contextlib.suppress(ConnectionError), socket.create_connection((self.address(first[target]), port), timeout=20):  # fmt: skip
                return True
            return False

        return self.switch.on(first[source], try_it)

    def pairs_used(self):
        """Pairs of roles that have connected since the rules were made."""
        inside = [(host, role) for host, role in self.roles.items() if role in INSIDE]
        return {pair for host, role in inside for pair in used(self.run(host, "iptables-save", "-c"), role)}

    def run(self, host, *command, text=None):
        done = subprocess.run([*self.switch.entering(host), *command], input=text, text=True, capture_output=True, check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, host, sets=()):
        role, address = self.roles[host], self.address(host)
        if role == "gateway":
            config = self._gateway(address)
        else:
            spec = ClusterSpec(model=self.name, host=address, transfer="tcp", drain_s=5.0)
            config = worker_config(
                spec,
                role=role,
                worker_id=host,
                run_dir=self.run_dir,
                model_dir=self.model_dir,
                gateways=[f"{self.address('gateway')}:{MEMBERSHIP}"],
                threads=1,
            )
            config["worker"] |= {"port": WORKER, "http_port": HEALTH}
            config["transfer"] |= {"host": address, "port": TRANSFER}
        path = self.run_dir / f"{host}.toml"
        path.write_text(to_toml(config))
        more = [word for value in sets for word in ("--set", value)]
        command = [
            *self.switch.entering(host),
            sys.executable,
            "-m",
            SERVICE_MODULES[role],
            "--config",
            str(path),
            *more,
        ]
        with (self.run_dir / f"{host}.log").open("w") as log:
            self.processes[host] = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, env=native_environment(threads=1)
            )

    def _gateway(self, address):
        return {
            "id": "gateway",
            "run_dir": str(self.run_dir),
            "secret_file": str(self.run_dir / "secret"),
            "http": {"host": address, "port": HTTP},
            "membership": {"host": address, "port": MEMBERSHIP},
            "listener": {"host": address, "port": HEALTH},
            "model": {"path": str(self.model_dir), "name": self.name},
        }

    def get(self, host, address, path):
        """GET from one host to another; returns the text."""
        return self.switch.on(host, lambda: httpx.get(f"http://{address}{path}", timeout=30).text)

    def workers(self):
        return json.loads(self.get("gateway", f"{self.address('gateway')}:{HEALTH}", "/statusz"))["workers"]

    def routable(self):
        return {worker["id"] for worker in self.workers() if worker["routable"]}

    def running(self, host):
        """Streams on a host, as its gateway was told last."""
        return sum(worker["running"] for worker in self.workers() if worker["id"] == host)

    def counted(self, host, name):
        """One counter of a process, over all its labels."""
        lines = self.get(host, f"{self.address(host)}:{HEALTH}", "/metrics").splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split()[0] == name)

    def moved(self):
        """Further attempts of streams: where their first worker was silent."""
        return self.counted("gateway", "tandem_gateway_retries_total")

    def admin(self):
        """Who orders workers about, as the controller does."""
        return AdminClient(Proof(SECRET.encode(), fresh_incarnation()))

    async def signals(self, is_over):
        """What a controller sees, four times a second until `is_over()`."""
        poll = GatewayPoll(self.admin(), [f"{self.address('gateway')}:{MEMBERSHIP}"], SystemClock())
        here = [Instance(id=h, role=h.partition("-")[0], state="ready") for h in self.processes if h != "gateway"]
        meter, found = Meter(), []
        while not is_over():
            gateways, age_s = await poll.read()
            now = time.monotonic()
            meter = meter.add(now, gateways)
            found.append(signals_of(meter, gateways, here, now=now, age_s=age_s))
            await asyncio.sleep(0.25)
        return found

    def joins(self, host):
        """Start a worker and wait until it gets work."""
        self.start(host)
        wait_for(lambda: host in self.routable(), START_S, f"{host} does not come")

    def leaves(self, host):
        """Drain a worker as the controller does, from its host, and wait until the process is gone; returns its exit code."""
        self.switch.on("controller", lambda: asyncio.run(self.admin().drain(f"{self.address(host)}:{WORKER}", 5.0)))
        return self.processes.pop(host).wait(START_S)

    def storm(self, items, seed=0, concurrency=6):
        """Outcomes of (prompt, text, tokens) items, by a client on a host of its own."""
        run = lambda: asyncio.run(storm(self.base_url, self.name, items, concurrency=concurrency, cancel_share=0, seed=seed))  # noqa: E731  # fmt: skip
        return self.switch.on("client", run)

    def logs(self):
        return "\n".join(f"== {p.name}\n{p.read_text()[-3000:]}" for p in sorted(self.run_dir.glob("*.log")))


class Load:
    """Streams without a pause while the body runs."""

    def __init__(self, cluster, items):
        """`items`: seed -> (prompt, text, tokens) of one round."""
        self._cluster = cluster
        self._items = items
        self._done = threading.Event()
        self.outcomes = []

    def __enter__(self):
        self._thread = threading.Thread(target=self._stream)
        self._thread.start()
        wait_for(lambda: self.outcomes, 60, "no load")
        return self

    def __exit__(self, *_):
        seen = len(self.outcomes)
        with contextlib.suppress(AssertionError):
            wait_for(lambda: len(self.outcomes) > seen, 60, "no load at the end")
        self._done.set()
        self._thread.join()

    def _stream(self):
        seed = 100
        while not self._done.is_set():
            self.outcomes += self._cluster.storm(self._items(seed), seed, concurrency=4)
            seed += 1

    def faults(self):
        return [fault for outcome in self.outcomes for fault in faults(outcome)]


@contextlib.contextmanager
def linked_cluster(run_dir, model_dir, name, hosts, pairs, spare=()):
    """Start a process on each host (host -> role) but the spare ones, wait until all serve, end them.

    Hosts whose role is no process of ours stand for what is outside. Nobody may connect but as `pairs` say.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "secret").write_text(SECRET)
    (run_dir / "secret").chmod(0o600)
    workers = {host for host, role in hosts.items() if role in ROLES} - {*spare}
    with Switch(list(hosts)) as switch:
        cluster = LinkedCluster(switch, hosts, run_dir, model_dir, name)
        try:
            cluster.close_all_but(pairs)
            for host in ("gateway", *sorted(workers)):
                cluster.start(host)
            wait_for(lambda: (run_dir / "gateway.json").exists() or dead(cluster), START_S, "no gateway")
            wait_for(lambda: dead(cluster) or cluster.routable() == workers, START_S, "not all workers serve")
            assert not dead(cluster), cluster.logs()
            yield cluster
        finally:
            for host in hosts:
                switch.cut(host, is_up=True)
            for process in cluster.processes.values():
                process.terminate()
            for process in cluster.processes.values():
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def dead(cluster):
    return [host for host, process in cluster.processes.items() if process.poll() is not None]
