"""The fence test at full length: `python -m tests.fakes.fence_campaign [--rounds 20] [--watch 3] [--record fence]`.

Runs `tests/contract/test_transport_fence.py` with so many rounds of every kind, watching the memory so many seconds after
each, and records what came of every transport; a campaign may be cut into parts by `--select` and `--add`. Also a pytest
plugin: the processes of the campaign load it.
"""

import argparse
import collections
import json
import re
import time

import pytest

from benchmarks.record import RESULTS, commit, write_record

SUITE = "tests/contract/test_transport_fence.py"
ONCE = {"test_nothing_lands_after_the_source_was_killed", "test_nothing_lands_after_the_reader_was_destroyed"}
"""Their process or transport ends with the round, so rounds are tests."""
NOTHING = {"seconds": 0, "rows": {}, "not_passed": []}


def pytest_addoption(parser):
    parser.addoption("--fence-rounds", type=int, default=20)
    parser.addoption("--fence-watch", type=float, default=3.0)


def pytest_generate_tests(metafunc):
    if metafunc.function.__name__ in ONCE:
        metafunc.fixturenames.append("fence_round")
        metafunc.parametrize("fence_round", range(metafunc.config.getoption("--fence-rounds")))


def pytest_collection_modifyitems(config, items):
    for item in items:
        item.module.ROUNDS = config.getoption("--fence-rounds")
        item.module.WATCH_S = config.getoption("--fence-watch")
        item.add_marker(pytest.mark.timeout(900))


class Verdicts:
    """Outcomes by transport and test."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        fresh = {"rounds": 0, "passed": 0, "failed": 0, "skipped": 0, "commit": commit()}
        self.rows = collections.defaultdict(fresh.copy)
        self.reasons: list[str] = []

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and report.outcome == "passed":
            return
        name, _, parameters = report.nodeid.rpartition("::")[2].partition("[")
        transport = re.sub(r"-?\b\d+\b-?", "", parameters.rstrip("]"))
        row = self.rows[f"{transport}: {name.removeprefix('test_').replace('_', ' ')}"]
        row[report.outcome] += 1
        row["rounds"] += 1 if name in ONCE or "would_be_caught" in name else self.rounds
        if report.outcome != "passed":
            self.reasons.append(f"{report.nodeid}: {report.longreprtext[-300:]}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--watch", type=float, default=3.0)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--select", default="", help="only these tests, as for pytest -k")
    parser.add_argument("--record", default="")
    parser.add_argument("--add", action="store_true", help="keep what the record holds of other tests")
    options = parser.parse_args()
    verdicts, start = Verdicts(options.rounds), time.monotonic()
    arguments = ["-q", "-p", "tests.fakes.fence_campaign", "-n", str(options.processes), SUITE]
    arguments += [f"--fence-rounds={options.rounds}", f"--fence-watch={options.watch}"]
    arguments += ["-k", options.select] if options.select else []
    code = pytest.main(arguments, plugins=[verdicts])
    if options.record:
        path = RESULTS / f"{options.record}.json"
        earlier = json.loads(path.read_text())["result"] if options.add else NOTHING
        result = {
            "watch_s": options.watch,
            "seconds": earlier["seconds"] + round(time.monotonic() - start),
            "rows": dict(sorted((earlier["rows"] | verdicts.rows).items())),
            "not_passed": earlier["not_passed"] + verdicts.reasons,
        }
        write_record(options.record, result, note="the oracle is the memory: a byte that changes after quiesced fails")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
