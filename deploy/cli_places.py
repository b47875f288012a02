"""Commands of `tandem` that prepare and check a cluster elsewhere: render, validate, prepare."""

import argparse
from collections.abc import Callable
from pathlib import Path

from core.errors import ConfigError
from deploy.cluster_description import ClusterDescription, read_description
from deploy.local.models import model_directory
from deploy.ray.manifests import check_manifest
from deploy.ray.plan import plan_of, spec_on_hosts
from deploy.render import PLACES, render, write_files
from deploy.validate_k8s import build, complaints


def add_place_commands(add: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Declare the commands; `add` takes a name and what it does. Each sets `run`."""
    command = add("render", "write what a cluster description means for a place")
    command.add_argument("--on", choices=PLACES, required=True)
    command.add_argument("-f", "--file", type=Path, help="cluster.yaml (default: all defaults)")
    command.add_argument("--out", type=Path, required=True, help="folder to write into")
    command.set_defaults(run=_render)
    command = add("validate", "check a cluster description, and for k8s and ray what is applied there")
    command.add_argument("--on", choices=(*PLACES, "ray"), required=True)
    command.add_argument("-f", "--file", type=Path, help="cluster.yaml")
    command.add_argument("--kubectl", default="kubectl")
    command.add_argument("folder", type=Path, nargs="?", help="for k8s: the overlay; for ray: a manifest")
    command.set_defaults(run=_validate)
    command = add("prepare", "make a built-in model in a folder, as MODELS/NAME")
    command.add_argument("model")
    command.add_argument("models", type=Path)
    command.set_defaults(run=_prepare)


def _read(options: argparse.Namespace) -> ClusterDescription:
    return read_description(options.file) if options.file is not None else ClusterDescription()


def _render(options: argparse.Namespace) -> int:
    for path in write_files(render(_read(options), options.on, options.out), options.out):
        print(path)
    return 0


def _validate(options: argparse.Namespace) -> int:
    if options.on == "ray":
        description = _read(options)
        plan_of(spec_on_hosts(description), description)
        if options.folder is not None:
            print(f"{options.folder}: {check_manifest(options.folder)}, nothing to complain about")
        return 0
    render(_read(options), options.on, options.folder or Path())
    if options.on == "k8s":
        if options.folder is None:
            raise ConfigError("validate --on k8s needs the folder of the overlay")
        docs = build(options.folder, options.kubectl)
        if found := complaints(docs):
            raise ConfigError(f"{options.folder}:\n" + "\n".join(f"- {complaint}" for complaint in found))
        print(f"{options.folder}: {len(docs)} objects, nothing to complain about")
    return 0


def _prepare(options: argparse.Namespace) -> int:
    made = model_directory(options.model, options.models, print).resolve()
    link = options.models / options.model
    if not link.exists():
        link.symlink_to(made, target_is_directory=True)
    print(link)
    return 0
