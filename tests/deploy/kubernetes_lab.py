"""Runs the checks of `kubernetes_proof` on a lab of its own: `make lab-k8s`. Debian 12, root, about a quarter of an hour.

In parts, where a machine must be shared meanwhile: `--keep` lets the lab stay with what was noted, `--attach` goes on.
"""

import argparse
import json
import os
import sys
import time
import traceback
from pathlib import Path

from benchmarks.record import write_record
from deploy.lab.kubernetes import Lab
from tests.deploy.kubernetes_proof import CHECKS, Proof

NOTE = "Kubernetes 1.20.2 from Debian's source, 2 nodes in namespaces, overlay ci"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binaries", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True, help="folder of image archives")
    parser.add_argument("--state", type=Path, default=Path("/tmp/tandem-lab"))
    parser.add_argument("--record", default="")
    parser.add_argument("--attach", action="store_true", help="take over a lab that stayed")
    parser.add_argument("--keep", action="store_true", help="let the lab stay")
    parser.add_argument("--only", nargs="*", default=CHECKS)
    options = parser.parse_args()
    lab, noted = Lab(options.state, options.binaries, ["w0", "w1"]), options.state / "facts.json"
    proof, well = Proof(lab), False
    try:
        if options.attach:
            proof.facts = json.loads(noted.read_text())
            proof.find()
        else:
            proof.note("lab up (s)", lab.up(sorted(options.images.glob("*.tar"))))
            proof.install()
        check_all(proof, options.only)
        well = not proof.facts["failed"]
    except BaseException:
        for name in ("get pods -A -o wide", "get events -A"):
            print(lab.kubectl(*name.split(), check=False)[-6000:], file=sys.stderr)
        raise
    finally:
        if options.keep:
            noted.write_text(json.dumps(proof.facts))
        else:
            begun = time.monotonic()
            lab.down()
            proof.note("lab down (s)", round(time.monotonic() - begun, 1))
        if options.record:
            write_record(options.record, proof.facts, note=NOTE)
    return 0 if well else 1


def check_all(proof, checks):
    done, failed = proof.facts.get("checks done", []), proof.facts.get("failed", [])
    loads = proof.facts.get("load average after each check", {})
    for check in checks:
        try:
            getattr(proof, check)()
            done.append(check)
        except Exception as error:
            traceback.print_exc()
            failed.append(f"{check}: {error}")
            print(proof.lab.kubectl("get", "pods", "-A", "-o", "wide", check=False), file=sys.stderr)
        loads[check] = round(os.getloadavg()[0], 1)
    proof.note("load average after each check", loads)
    proof.note("checks done", done)
    proof.note("failed", failed)


if __name__ == "__main__":
    sys.exit(main())
