"""The noise scale of the same two problems, by every capture: the table of docs/captures.md.

    python -m tests.benchmarks.captures > docs/captures.md

The test tests/hooks/test_captures.py holds every row to the truth; this prints what was found.
"""

import argparse
import sys

from tests.hooks.captures import CAPTURES, GLOBAL_BATCH, STEPS, Problem, alone, measure
from tests.hooks.ranks import Ranks

PROBLEMS: tuple[Problem, ...] = ("synthetic", "digits")


def main() -> None:
    """Measure and print."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    pools = {count: Ranks(count) for count in sorted({c.ranks for c in CAPTURES.values()} - {1})}
    lines, truths = [], {}
    for name, capture in CAPTURES.items():
        cells = [name]
        for problem in PROBLEMS:
            if capture.ranks == 1:
                estimate, truth = alone(name, problem)
            else:
                estimate, truth = pools[capture.ranks].run(measure, name=name, problem=problem)[0]
            truths[problem] = truth
            upper = "∞" if estimate.upper is None else f"{estimate.upper:.1f}"
            cells += [f"{estimate.noise_scale:.1f}", f"{estimate.lower:.1f} to {upper}"]
        lines.append(f"| {' | '.join(cells)} |")
        sys.stderr.write(f"{name}\n")
    for pool in pools.values():
        pool.stop()
    print(  # noqa: T201  its output
        "# The same number, however it is taken\n\n"
        f"Two problems at a global batch of {GLOBAL_BATCH}, measured through every capture. The synthetic "
        "one's\n"
        f"noise scale is {truths['synthetic']:.0f} by construction ({STEPS['synthetic']} steps); that of the "
        "digits net, at a fixed point of its\n"
        f"training, is {truths['digits']:.1f} by per-example gradients over the whole data set "
        f"({STEPS['digits']} steps).\n\n"
        "| capture | synthetic | 95% interval | digits | 95% interval |\n|---|---:|---|---:|---|"
    )
    print("\n".join(lines))  # noqa: T201  its output
    print(  # noqa: T201  its output
        "\nRows that share a number of ranks see the same data, so their numbers move together. Made by\n"
        "`python -m tests.benchmarks.captures`; `tests/hooks/test_captures.py` holds every row to the truth."
    )


if __name__ == "__main__":
    main()
