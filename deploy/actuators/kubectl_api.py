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

    def _url(self, path: str) -> str:
        group, _, rest = path.partition(":")
        return f"/{group}/namespaces/{self._namespace}/{rest}"

    def _run(self, arguments: list[str], text: str | None = None) -> Body:
        command = [*self._kubectl, *arguments]
        try:
            done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
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
