"""Writes what one cluster description means for a place, into a folder: `tandem render --on PLACE -f cluster.yaml`.

Pure functions make the texts; `write_files` is the only thing that touches the disk. Nothing is started.
"""

from collections.abc import Mapping
from pathlib import Path

from core.errors import ConfigError
from deploy.cluster_description import ClusterDescription
from deploy.render_config import METAL, service_configs
from deploy.render_k8s import k8s_files

PLACES = ("local", "k8s")


def render(description: ClusterDescription, place: str, folder: Path) -> Mapping[str, str]:
    """Return relative file names and their texts; `folder` is where they will lie. Raises ConfigError for a place."""
    match place:
        case "local":
            return service_configs(description, METAL)
        case "k8s":
            return k8s_files(description, folder)
        case _:
            raise ConfigError(f"nothing is rendered for {place!r}; use {' or '.join(PLACES)}")


def write_files(files: Mapping[str, str], folder: Path) -> list[Path]:
    """Write rendered files and return their paths. A kustomization that is there already is its owner's: it stays."""
    written: list[Path] = []
    for name, text in files.items():
        path = folder / name
        if path.name == "kustomization.yaml" and path.exists():
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {(error.strerror or str(error)).lower()}") from error
        written.append(path)
    return written
