"""The `tandem` command: one cluster on this machine, one process of it, or a look at either.

Parses, dispatches, prints. What a cluster is lies in `deploy.local`; what a process is, in its own package.
"""

import argparse
import asyncio
import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec

from core.clock import SystemClock
from core.errors import ConfigError, TandemError
from core.lifecycle import EXIT_PREFLIGHT
from deploy.cli_places import add_place_commands
from deploy.cluster_description import read_description
from deploy.demo import run_demo
from deploy.doctor import findings, run_doctor
from deploy.doctor_transfer import judge, look
from deploy.kubernetes_commands import k8s_ask
from deploy.local.control import ask
from deploy.local.described import spec_of
from deploy.local.models import cache_directory, model_directory
from deploy.local.session import Session
from deploy.local.spec import SERVICE_MODULES, ClusterSpec, check_spec, with_sets
from deploy.ray.commands import ray_ask, ray_down, ray_up
from deploy.ray.plan import plan_of, spec_on_hosts
from deploy.status import render_status

EPILOG = "Start with: tandem up    Stop with Ctrl-C or: tandem down"


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; exits with 0, 2 (usage), 3 (preflight) or 1."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in SERVICE_MODULES:
        os.execv(sys.executable, [sys.executable, "-m", SERVICE_MODULES[arguments[0]], *arguments[1:]])
    options = _parser().parse_args(arguments)
    try:
        sys.exit(options.run(options))
    except TandemError as error:
        print(f"tandem: {error.message}", file=sys.stderr)
        sys.exit(EXIT_PREFLIGHT if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


def run_directory(options: argparse.Namespace) -> Path:
    """Return where a named cluster keeps its sockets, logs and ready files."""
    return Path(options.run_dir) if options.run_dir else Path.home() / ".tandem" / "run" / options.name


def _say(text: str) -> None:
    print(text, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tandem", description="Disaggregated prefill/decode serving.", epilog=EPILOG)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--name", default="default", help="name of the cluster (default: default)")
        command.add_argument("--run-dir", help="its run directory (default: ~/.tandem/run/NAME)")
        command.add_argument(
            "--on", choices=("local", "ray", "k8s"), default="local", help="where it runs (default: here)"
        )
        command.add_argument("--address", default="auto", help="with --on ray: HOST:PORT of the Ray cluster")
        command.add_argument("--namespace", default="tandem", help="with --on k8s (default: tandem)")
        return command

    up = add("up", "start a cluster: on this machine it serves until Ctrl-C, on Ray until `tandem down`")
    up.add_argument("-f", "--file", type=Path, help="cluster.yaml; flags override it")
    up.add_argument("--model", help="smollm2 | tiny-llama | tiny-window | v41-tiny | v41-mini | scripted | DIRECTORY")
    up.add_argument("--served-name", help="name that clients use for the model")
    up.add_argument("--prefill", type=int, help="prefill workers (default 1)")
    up.add_argument("--decode", type=int, help="decode workers (default 1)")
    up.add_argument("--host", help="address to bind (default 127.0.0.1)")
    up.add_argument("--port", type=int, help="HTTP port (default 8000; 0 takes a free one)")
    up.add_argument("--transfer", help="auto | shm | tcp | nixl | mooncake | mori (default auto)")
    up.add_argument("--prefill-mode", help="local | remote | auto (default remote)")
    up.add_argument("--drain-s", type=float, help="seconds a leaving worker may finish its work (default 60)")
    up.add_argument("--autoscale", action="store_true", default=None, help="run a controller that sizes the pools")
    up.add_argument("--set", action="append", default=[], metavar="ROLE:KEY=VALUE", help="e.g. all:engine.num_pages=64")
    up.set_defaults(run=_up)
    add("status", "show the cluster's processes").set_defaults(run=_status)
    scale = add("scale", "change the size of a pool, e.g. decode=3 prefill=2")
    scale.add_argument("pools", nargs="+", metavar="POOL=N")
    scale.set_defaults(run=_scale)
    rollout = add("rollout", "replace all processes, or those with other settings, while the cluster serves")
    rollout.add_argument("--set", action="append", default=[], metavar="ROLE:KEY=VALUE", help="as for up")
    rollout.add_argument("--model", help="other weights under the same public name: a built-in or a DIRECTORY")
    rollout.add_argument("--surge", type=_positive, default=1, help="workers of a pool to start at a time (default 1)")
    rollout.add_argument("--to", help="with --on k8s: the folder whose workers replace the present ones, pair by pair")
    rollout.add_argument("--abort", action="store_true", help="end the running rollout and go back")
    rollout.set_defaults(run=_rollout)
    drain = add("drain", "let one worker finish its work and leave, e.g. decode-1")
    drain.add_argument("worker")
    drain.set_defaults(run=_drain)
    down = add("down", "end the cluster")
    down.add_argument("--budget-s", type=float, help="seconds for open requests (default: the cluster's drain budget)")
    down.set_defaults(run=_down)
    demo = add("demo", "start a cluster, stream one answer, show the figures, end it")
    demo.add_argument("--model", default="smollm2")
    demo.add_argument("--transfer", default="auto")
    demo.add_argument("--question", default="What is the capital of France? Answer in one sentence.")
    demo.set_defaults(run=_demo)
    doctor = add("doctor", "check this machine and say what is missing")
    doctor.add_argument("--transfer", action="store_true", help="look at what moving KV needs, instead")
    doctor.set_defaults(run=_doctor)
    add_place_commands(lambda name, text: commands.add_parser(name, help=text, description=text))
    for name, module in SERVICE_MODULES.items():
        commands.add_parser(name, help=f"run one {name} process (python -m {module} --config FILE --set a.b=c)")
    return parser


def cluster_spec(options: argparse.Namespace) -> ClusterSpec:
    """Combine the file and the flags; flags win."""
    return with_flags(spec_of(read_description(options.file)) if options.file else ClusterSpec(), options)


def with_flags(spec: ClusterSpec, options: argparse.Namespace) -> ClusterSpec:
    """Lay the flags over a cluster; raises ConfigError if no cluster can be started from the result."""
    names = (
        "model",
        "served_name",
        "prefill",
        "decode",
        "host",
        "port",
        "transfer",
        "prefill_mode",
        "drain_s",
        "autoscale",
    )
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    sets = with_sets(spec, _sets(options.set)).sets
    merged = {**msgspec.structs.asdict(spec), **given, "sets": sets, "name": options.name}
    try:
        result = msgspec.convert(merged, ClusterSpec)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the cluster description is wrong: {error}") from error
    check_spec(result)
    return result


def _sets(values: list[str]) -> dict[str, list[str]]:
    sets: dict[str, list[str]] = {}
    for value in values:
        role, colon, assignment = value.partition(":")
        if not colon or "=" not in assignment:
            raise ConfigError(f"--set {value!r} is not ROLE:KEY=VALUE, e.g. all:engine.num_pages=64")
        sets.setdefault(role, []).append(assignment)
    return sets


def _positive(text: str) -> int:
    count = int(text)
    if count < 1:
        raise ValueError(text)
    return count


def _ask(options: argparse.Namespace, body: dict[str, object]) -> dict[str, object]:
    if options.on == "ray":
        return ray_ask(options.address, options.name, body, _say)
    if options.on == "k8s":
        return k8s_ask(options.namespace, body, _say)
    return ask(run_directory(options), body, _say)


def _up(options: argparse.Namespace) -> int:
    if options.on == "k8s":
        raise ConfigError("on Kubernetes: tandem render --on k8s -f cluster.yaml --out FOLDER; kubectl apply -k FOLDER")
    if options.on == "ray":
        description = read_description(options.file) if options.file else None
        spec = with_flags(spec_on_hosts(description) if description else ClusterSpec(), options)
        return ray_up(options.address, plan_of(spec, description), _say)
    spec = cluster_spec(options)
    model_dir = model_directory(spec.model, cache_directory(), _say)
    session = Session(spec=spec, run_dir=run_directory(options), model_dir=model_dir, clock=SystemClock(), report=_say)
    return asyncio.run(session.run())


def _status(options: argparse.Namespace) -> int:
    _say(render_status(_ask(options, {"command": "status"})))
    return 0


def _scale(options: argparse.Namespace) -> int:
    pools: dict[str, object] = {}
    for text in cast("list[str]", options.pools):
        role, equals, count = text.partition("=")
        if not equals or not count.isdigit():
            raise ConfigError(f"{text!r} is not POOL=N, e.g. decode=3")
        pools[role] = int(count)
    _say(render_status(_ask(options, {"command": "scale", "pools": pools})))
    return 0


def _rollout(options: argparse.Namespace) -> int:
    if options.abort:
        _ask(options, {"command": "abort"})
        return 0
    body: dict[str, object] = {"command": "rollout", "sets": _sets(options.set), "surge": options.surge}
    if options.to:
        if options.on != "k8s":
            raise ConfigError("--to is a folder of Kubernetes manifests; use it with --on k8s")
        body["to"] = options.to
    if options.model:
        # On Ray every host finds the model for itself.
        is_here = options.on == "local"
        body["model_dir"] = str(model_directory(options.model, cache_directory(), _say)) if is_here else options.model
    _say(render_status(_ask(options, body)))
    return 0


def _drain(options: argparse.Namespace) -> int:
    _ask(options, {"command": "drain", "worker": options.worker})
    return 0


def _down(options: argparse.Namespace) -> int:
    if options.on == "k8s":
        raise ConfigError("on Kubernetes: kubectl delete -k FOLDER")
    if options.on == "ray":
        return ray_down(options.address, options.name, options.budget_s, _say)
    body: dict[str, object] = {"command": "down"}
    if options.budget_s is not None:
        body["budget_s"] = options.budget_s
    pid = cast("int", ask(run_directory(options), body, _say)["pid"])
    descriptor = os.pidfd_open(pid)
    try:
        select.select([descriptor], [], [])
    finally:
        os.close(descriptor)
    _say("the cluster is gone")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    return run_doctor(_say, judge(look()) if options.transfer else findings())


def _demo(options: argparse.Namespace) -> int:
    return run_demo(model=options.model, transfer=options.transfer, question=options.question, report=_say)


if __name__ == "__main__":
    main()
