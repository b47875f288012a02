"""`KubernetesApi` through kubectl, for people and scripts outside of the cluster: their own access, no library."""

import asyncio
import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import cast
from urllib.parse import urlencode

from core.errors import ConfigError
from deploy.actuators.kubernetes_api import Body, Conflict
from deploy.cluster_description import PortsPart

TIMEOUT_S = 60.0


class KubectlApi:
    """`kubectl` is the program and its options, e.g. ``("kubectl", "--context", "lab")``."""

    def __init__(self, namespace: str, kubectl: Sequence[str] = ("kubectl",)) -> None:
        """Start nothing; `namespace` is where the cluster's objects are."""
        self._namespace = namespace
        self._kubectl = list(kubectl)

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Body:
        url = self._url(path) + (f"?{urlencode(query)}" if query else "")
        return self._run(["get", "--raw", url])

    def put(self, path: str, body: Body) -> Body:
        return self._run(["replace", "--raw", self._url(path), "-f", "-"], json.dumps(body))

    def patch(self, path: str, body: Body) -> Body:
        kind, _, name = path.partition(":")[2].partition("/")
        flags = ["--namespace", self._namespace, "--type=merge", "-o", "json"]
        return self._run(["patch", kind, name, *flags, "-p", json.dumps(body)])

    async def drain(self, pod: Body) -> None:
        """Ask a pod's process to drain: it takes that from its own host, so the request is made inside. Raises ConfigError."""
        flags = ["--namespace", self._namespace, pod["metadata"]["name"], "-c", pod["spec"]["containers"][0]["name"]]
        command = ["python", "-m", "deploy.leave", "--port", str(PortsPart().metrics), "--wait-s", "0"]
        await asyncio.to_thread(self._run, ["exec", *flags, "--", *command])

    async def statusz(self, pod: str) -> Body:
        """Return what a pod's process says of itself; raises ConfigError."""
        code = f"import urllib.request as r; print(r.urlopen('http://127.0.0.1:{PortsPart().metrics}/statusz', timeout=5).read().decode())"
        command = ["exec", "--namespace", self._namespace, pod, "--", "python", "-c", code]
        return await asyncio.to_thread(self._run, command)

    def apply(self, docs: Sequence[Mapping[str, object]]) -> None:
        """Apply whole objects, as `kubectl apply` does; raises ConfigError."""
        body = {"apiVersion": "v1", "kind": "List", "items": list(docs)}
        self._run(["apply", "--namespace", self._namespace, "-f", "-"], json.dumps(body))

    def delete(self, deployment: str, *, keep_pods: bool) -> None:
        """Remove a Deployment, if it is there; with `keep_pods` its pods stay, for another Deployment that takes them."""
        cascade = f"--cascade={'orphan' if keep_pods else 'background'}"
        self._run(["delete", "deployment", deployment, "--namespace", self._namespace, cascade, "--ignore-not-found"])

    def wait_rolled(self, deployment: str) -> None:
        """Wait until a Deployment runs what it describes; raises ConfigError."""
        self._run(["rollout", "status", f"deployment/{deployment}", "--namespace", self._namespace], timeout_s=None)

    def _url(self, path: str) -> str:
        group, _, rest = path.partition(":")
        return f"/{group}/namespaces/{self._namespace}/{rest}"

    def _run(self, arguments: list[str], text: str | None = None, timeout_s: float | None = TIMEOUT_S) -> Body:
        command = [*self._kubectl, *arguments]
        try:
            done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=timeout_s)
        except FileNotFoundError as error:
            raise ConfigError(f"{self._kubectl[0]} is not installed") from error
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"kubectl {arguments[0]} did not end within {TIMEOUT_S:g} s") from error
        if done.returncode:
            said = done.stderr.strip()
            kind = Conflict if "Conflict" in said or "has been modified" in said else ConfigError
            raise kind(f"kubectl {arguments[0]}: {said}")
        try:
            return cast("Body", json.loads(done.stdout))
        except ValueError:
            return {"message": done.stdout.strip()}
