"""T4, A17: the images as they are built, run with the rights that the manifests give them: `make lab-image`.

Debian 12, root: podman with runc. Each check is a fact of a real container; the record holds all of them.
"""

import json
import subprocess
import sys
import time

from benchmarks.record import write_record

PODMAN = ["podman", "--runtime", "runc", "--cgroup-manager", "cgroupfs"]
RUN = ["--network", "none", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096"]
RESTRICTED = ["--read-only", "--cap-drop=all", "--security-opt", "no-new-privileges", "--tmpfs", "/tmp"]
GATEWAY, WORKER = "localhost/tandem-gateway:dev", "localhost/tandem-worker:dev"
VOLUME, NAME = "tandem-image-proof", "tandem-image-proof"
LARGEST_MB = {GATEWAY: 300, WORKER: 1000}
"""Budgets: Debian and Python are 104 MB, the gateway's dependencies the rest; a worker adds torch for CPUs."""
START_S = 120.0
MODEL = ["--set", "model.path=/models/scripted"]
FACTS: dict[str, object] = {}


def note(name, value, ok):
    FACTS[name] = value
    print(f"{name}: {json.dumps(value)}", flush=True)
    assert ok, name


def podman(*arguments, check=False):
    # Not where we are: it leaves a file where it runs when a container is killed for its memory.
    done = subprocess.run([*PODMAN, *arguments], cwd="/tmp", capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(done.stderr)
    return done


def inside(code):
    """Run Python inside the running container; returns what it printed."""
    return podman("exec", NAME, "python", "-c", code).stdout.strip()


def worker(*more, sets=()):
    flags = [word for value in sets for word in ("--set", value)]
    base = ["--set", "worker.id=p", "--set", "worker.secret_file=/models/secret", *MODEL]
    return podman(
        "run", "--rm", *RUN, *RESTRICTED, *more, "-v", f"{VOLUME}:/models:ro", WORKER, "prefill", *base, *flags
    )


def looks():
    for image in (GATEWAY, WORKER):
        (found,) = json.loads(podman("image", "inspect", image, check=True).stdout)
        size = round(found["Size"] / 1e6)
        note(f"{image} size (MB), budget", [size, LARGEST_MB[image]], size <= LARGEST_MB[image])
        config = found["Config"]
        note(f"{image} user, entry point", [config["User"], config["Entrypoint"]], config["User"] == "10001:10001")
        assert config["Entrypoint"] == ["/usr/bin/tini", "--", "tandem"], "a shell would keep SIGTERM to itself"
        assert "HEALTHCHECK" not in json.dumps(found), "probes are the orchestrator's"
        code = (
            "import os; print([os.path.join(d, f) for d, _, fs in os.walk('/') for f in fs "
            "if f.endswith(('.safetensors', '.gguf')) and not d.startswith('/proc')])"
        )
        weights = podman("run", "--rm", *RUN, "--entrypoint", "python", image, "-c", code, check=True).stdout.strip()
        note(f"{image} weights", weights, weights == "[]")


def runs():
    """A gateway as the manifests run it: who it is, what it may not do, when it is ready, how it leaves."""
    podman("run", "-d", "--name", NAME, *RUN, *RESTRICTED, "-v", f"{VOLUME}:/models:ro", GATEWAY, "gateway", *MODEL, "--set", "listener.port=9400", check=True)  # fmt: skip
    begun = time.monotonic()
    probe = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9400/readyz', timeout=2).status)"
    while inside(probe) != "200":
        assert time.monotonic() - begun < START_S, podman("logs", NAME).stderr[-2000:]
    note("gateway ready after (s)", round(time.monotonic() - begun, 1), ok=True)
    who = inside("import os; print(os.getuid(), os.getgid())")
    note("uid and gid", who, who == "10001 10001")
    capabilities = inside("print([l.split()[1] for l in open('/proc/1/status') if l.startswith('CapEff')][0])")
    note("effective capabilities", capabilities, int(capabilities, 16) == 0)
    written = podman("exec", NAME, "python", "-c", "open('/opt/x', 'w')").stderr.strip().splitlines()[-1]
    note("writing to the root", written, "Read-only" in written)
    begun = time.monotonic()
    podman("kill", "--signal", "TERM", NAME, check=True)
    code = podman("wait", NAME, check=True).stdout.strip()
    note("SIGTERM: exit code, seconds", [code, round(time.monotonic() - begun, 1)], code == "0")
    podman("rm", NAME, check=True)


def leaves():
    """The preStop hook of the manifests ends the process in order, without a signal."""
    podman("run", "-d", "--name", NAME, *RUN, *RESTRICTED, "-v", f"{VOLUME}:/models:ro", GATEWAY, "gateway", *MODEL, "--set", "listener.port=9400", check=True)  # fmt: skip
    begun = time.monotonic()
    while podman("exec", NAME, "python", "-m", "deploy.leave", "--port", "9400", "--wait-s", "0").returncode:
        assert time.monotonic() - begun < START_S
    code = podman("wait", NAME, check=True).stdout.strip()
    podman("rm", NAME, check=True)
    note("preStop hook: exit code", code, code == "0")


def fails():
    """What is missing is said in one sentence, with the exit code of a preflight."""
    small = worker("--shm-size", "16m", sets=['transfer.transports=["shm"]', "engine.num_pages=200000"])
    note("16 MB of shared memory", [small.returncode, small.stderr.strip().splitlines()[-1]], small.returncode == 3)
    assert "/dev/shm" in small.stderr
    wrong = worker(sets=["engine.num_page=1"])
    note("a wrong setting", [wrong.returncode, wrong.stderr.strip().splitlines()[-1]], wrong.returncode == 3)
    killed = worker("--memory", "64m", "--memory-swap", "64m")
    note("64 MB of memory", killed.returncode, killed.returncode == 137)


def computes():
    """A whole cluster in the worker's image says what the same one says outside of it: nothing was taken out that counts."""
    demo = ["demo", "--model", "tiny-llama", "--question", "What is two and two?"]
    mounted = ["--shm-size", "1g", *RUN[2:], *RESTRICTED]
    within = podman("run", "--rm", *mounted, WORKER, *demo)
    assert within.returncode == 0, within.stdout + within.stderr
    command = [sys.executable, "-m", "deploy.cli", *demo]
    outside = subprocess.run(command, capture_output=True, text=True, check=True)
    texts = [run.stdout.partition("question:")[2].partition("time to first token")[0] for run in (within, outside)]
    equal = texts[0] == texts[1] and len(texts[0]) > len(demo[-1]) + 20
    note("a whole cluster inside, 64 tokens of tiny-llama equal to those outside", equal, equal)


def main():
    podman("rm", "-f", NAME)
    podman("volume", "rm", "-f", VOLUME)
    podman("volume", "create", VOLUME, check=True)
    try:
        mounted = ["-v", f"{VOLUME}:/models"]
        podman("run", "--rm", *RUN, *mounted, WORKER, "prepare", "scripted", "/models", check=True)
        secret = "open('/models/secret', 'w').write('0123456789abcdef' * 2)"
        podman("run", "--rm", *RUN, *mounted, "--entrypoint", "python", WORKER, "-c", secret, check=True)
        for check in (looks, runs, leaves, fails, computes):
            check()
    finally:
        podman("rm", "-f", NAME)
        podman("volume", "rm", "-f", VOLUME)
    write_record("lab_image", FACTS, note="podman and runc of Debian 12; images of deploy/image/build.sh")


if __name__ == "__main__":
    sys.exit(main())
