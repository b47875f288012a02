"""A11 in the lab: another revision of the weights comes pair by pair, a way back is aborted, another goes pool after pool.

The other revision has five lanes of KV instead of four: another fingerprint, and another text for every prompt, so a stream
whose KV came from one and whose tokens came from the other would say neither.
"""

import contextlib
import os
import subprocess
import threading
import time

from deploy.kubernetes_rollout import deployments_of, new_name
from deploy.validate_k8s import build
from engine.models.builtin import SCRIPTED
from tests.deploy.overlays import K8S, kubectl

LANES = 5
STEP_MS = 30.0
"""Of the model's engine, so that streams are open on a worker whenever it leaves: without, an answer takes it milliseconds."""
CODE = (
    "import pathlib, msgspec; from engine.models.builtin import SCRIPTED, prepare_scripted; made = prepare_scripted("
    "pathlib.Path('/models'), msgspec.structs.replace(SCRIPTED, kv_lanes={lanes}, step_delay_ms={step_ms})); "
    "pathlib.Path('/models/scripted').symlink_to(made)"
)
OVERLAY = """\
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [{ci}]
patches:
  - target: {{kind: Deployment, labelSelector: "tandem/role in (prefill,decode)"}}
    patch: |-
      - {{op: add, path: /spec/template/spec/initContainers/0/command, value: [python, -c, "{code}"]}}
      - {{op: remove, path: /spec/template/spec/initContainers/0/args}}
"""
POOLS = ("prefill", "decode")


def overlay(folder, lanes=SCRIPTED.kv_lanes):
    """Write overlay `ci` with a slow model of so many lanes into a folder, which is returned."""
    folder.mkdir(exist_ok=True)
    code = CODE.format(lanes=lanes, step_ms=STEP_MS)
    text = OVERLAY.format(ci=os.path.relpath(K8S / "overlays/ci", folder.resolve()), code=code)
    (folder / "kustomization.yaml").write_text(text)
    return folder


def show(proof):
    """There, aborted, and back as a control; every stream is compared with what its revision must say."""
    forward(proof, overlay(proof.lab.state / "next", LANES))
    aborted(proof, proof.overlay)
    control(proof)


def forward(proof, folder):
    begun = time.monotonic()
    with least(proof) as lowest, proof.load("A11 streams while pairs are replaced", lanes=(LANES,)) as result:
        done = proof.cli(f"tandem rollout --on k8s --to {folder}")
    assert done.returncode == 0, done.stdout + done.stderr
    proof.note("A11 what the command said, seconds", [done.stdout.splitlines()[:4], round(time.monotonic() - begun, 1)])
    proof.note("A11 least that had started and stayed", lowest)
    assert result["faults"] == []
    assert 0 < result["of other revisions"][str(LANES)] < result["streams"], "both revisions were to serve"
    assert {role: lowest[role] for role in POOLS} == dict.fromkeys(POOLS, 2), "capacity fell below the floor"
    assert lowest["pairs"] > 0, "no whole pair served"
    assert {*deployments_of(proof.api)} == {"gateway", "controller", *POOLS}
    recomputed = proof.counted("tandem_recomputed_tokens_total")
    proof.note("A11 tokens computed again", recomputed)
    assert not any(recomputed.values())


def aborted(proof, back_to):
    def present():
        return {p["metadata"]["name"]: revision(p) for role in POOLS for p in proof.pods(role)}

    before = present()
    with least(proof) as lowest, proof.load("A11 streams while a rollout is aborted", lanes=(LANES,)) as result:
        running = subprocess.Popen(proof.line(f"tandem rollout --on k8s --to {back_to}"), **proof.surroundings())
        while not ready_new(proof):
            assert running.poll() is None, running.stderr.read()
            time.sleep(1.0)
        back = proof.cli("tandem rollout --on k8s --abort")
        said = running.communicate(timeout=60)[1]
    proof.note("A11 aborted: both exit codes, what the first one said", [running.returncode, back.returncode, said.strip()])  # fmt: skip
    assert back.returncode == 0, back.stderr
    assert running.returncode != 0
    assert result["faults"] == []
    assert {role: lowest[role] for role in POOLS} == dict.fromkeys(POOLS, 2)
    assert lowest["pairs"] > 0
    for role in POOLS:
        proof.has(role, 2)
    after = present()
    proof.note("A11 aborted: old workers that stayed, of", [len({*before} & {*after}), len(before)])
    assert {*after.values()} == {*before.values()}, "only the old revision is left"


def ready_new(proof):
    found = deployments_of(proof.api)
    return all(found.get(new_name(r), {}).get("status", {}).get("readyReplicas") for r in POOLS)


def control(proof):
    """Back pool after pool, as any rolling update would: no whole pair is left, else the proof above proves nothing.

    Streams need not fail even then: a decode worker without a prefill worker of its revision computes prompts itself.
    """
    docs = {d["metadata"]["name"]: d for d in build(proof.overlay, kubectl()) if d["kind"] == "Deployment"}
    name = "A11 negative control: streams while one pool follows the other"
    with least(proof) as lowest, proof.load(name, lanes=(LANES,)):
        for role in ("decode", "prefill"):
            proof.api.apply([docs[role]])
            proof.api.wait_rolled(role)
    proof.note("A11 negative control: least whole pairs", lowest["pairs"])
    assert lowest["pairs"] == 0, "pool after pool kept a whole pair: the proof cannot fail"
    for role in POOLS:
        proof.has(role, 2)


@contextlib.contextmanager
def least(proof):
    """The smallest number of workers of each pool that had started and were not leaving while the body runs, and of whole
    pairs of one revision.

    Not of those that are ready: on a busy machine a probe of a worker that serves may time out.
    """
    lowest, done = dict.fromkeys((*POOLS, "pairs"), 99), threading.Event()

    def look():
        while not done.wait(1.0):
            pods = proof.api.get("api/v1:pods", {"labelSelector": f"tandem/role in ({','.join(POOLS)})"})["items"]
            serving = [(p["metadata"]["labels"]["tandem/role"], revision(p)) for p in pods if serves(p)]
            now = {role: sum(r == role for r, _ in serving) for role in POOLS}
            now["pairs"] = sum(min(serving.count((role, r)) for role in POOLS) for r in {r for _, r in serving})
            for name, count in now.items():
                lowest[name] = min(lowest[name], count)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield lowest
    finally:
        done.set()
        thread.join()


def serves(pod):
    states = pod["status"].get("containerStatuses", [])
    return bool(states) and all(s["started"] for s in states) and not pod["metadata"].get("deletionTimestamp")


def revision(pod):
    return str(pod["spec"]["initContainers"][0].get("command"))
