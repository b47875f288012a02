"""Checks and times every kernel on a GPU beside its limit and its peers, and writes one record.

``python -m benchmarks.kernels_gpu --out kernels.json [--vendor NAME] [op ...]``: trials of `benchmarks.kernel_trials` at all
real sizes: a kernel that is wrong is not timed. The limit is the larger of bytes over the copy bandwidth and operations over
the matrix rate, both measured in the same run.
"""

import sys

from benchmarks.kernel_cases import CASES
from benchmarks.kernel_checks import provider_named, serves
from benchmarks.kernel_trials import Trial, run_trials, trials_parser


def main() -> int:
    parser = trials_parser(__doc__)
    parser.add_argument("--vendor", help="time this package's kernels beside ours")
    parser.add_argument("ops", nargs="*")
    options = parser.parse_args()
    provider, more = provider_named(options.vendor), {"vendor": options.vendor} if options.vendor else {}
    cases = [case for case in CASES if serves(provider, case.op) and case.op in (options.ops or (case.op,))]
    trials: list[Trial] = [{"op": case.op, "size": size, "set": {}, **more} for case in cases for size in case.large]
    return run_trials(trials, options)


if __name__ == "__main__":
    sys.exit(main())
