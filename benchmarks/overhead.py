"""What evenstep costs on real compute: two equal workers on a core each, beside the better of plain DDP's options."""

import sys
import tempfile
from statistics import median

from harness import real_compute, record
from harness.real_compute import OURS, PLAIN, Case
from harness.workers import run_workers

# By group: cases, each with its rounds and the seconds of a block.
GROUPS = {
    "small": {
        Case(millions=0.1, few=True, batch=32): (30, 0.12),
        Case(millions=0.1, few=True, batch=512): (12, 0.2),
        Case(millions=0.1, few=False, batch=32): (12, 0.2),
        Case(millions=5, few=True, batch=2): (12, 0.25),
        Case(millions=5, few=True, batch=16): (16, 0.3),
        Case(millions=5, few=False, batch=16): (10, 0.4),
        Case(millions=5, few=True, batch=256): (5, 0.6),
    },
    "large": {
        Case(millions=25, few=True, batch=4): (6, 0.6),
        Case(millions=25, few=True, batch=64): (6, 0.8),
        Case(millions=25, few=False, batch=16): (6, 0.8),
    },
    "huge": {
        Case(millions=100, few=True, batch=4): (5, 1.0),
        Case(millions=100, few=False, batch=4): (5, 1.0),
    },
}
QUICK = {Case(millions=0.1, few=True, batch=32): (3, 0.05)}
COUNTED = Case(millions=0.1, few=True, batch=8)
LONG_SECONDS = 0.045
"""From here on an iteration may take 1.01 times DDP's, below it 1.03 times."""
VARIANTS = ("ddp", "ddp-views", "ddp-hook", "bsp", "lb-bsp", "lb-bsp+log")
HUGE_VARIANTS = ("ddp-views", "bsp", "lb-bsp")
"""Of models that do not fit into this machine's memory six times."""


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--group", choices=GROUPS, default="small")
    parser.add_argument("--cases", type=int, nargs="*", help="only these of the group, counted from 0")
    options = parser.parse_args()
    cases = QUICK if options.quick else GROUPS[options.group]
    if options.cases is not None:
        cases = {case: plan for number, (case, plan) in enumerate(cases.items()) if number in options.cases}
    raw, figures, tables = {}, [], []
    counts = run_workers(real_compute.WORKERS, real_compute.calls, (COUNTED, (*PLAIN, *OURS), 20))
    for case, (rounds, seconds) in cases.items():
        variants = VARIANTS if case.millions < 100 else HUGE_VARIANTS
        with tempfile.TemporaryDirectory() as run_dir:
            plan = (case, variants, rounds, seconds, run_dir)
            raw[case.name] = run_workers(real_compute.WORKERS, real_compute.by_turns, plan, record.console.print)
        figures += _figures(case, raw[case.name]["blocks"])
        tables.append(_parts(case, raw[case.name]))
    for column, what in enumerate(("Python calls", "calls")):
        figures += [
            record.figure(f"{what} beyond plain DDP's: {name}", [counts[name][column] - counts["ddp"][column]])
            for name in OURS
        ]
    done = record.publish(
        f"overhead-{options.group}",
        "Two equal workers on real compute: times the better of plain DDP's options",
        options,
        config={"cases": {case.name: plan for case, plan in cases.items()}, "warmup": real_compute.WARMUP},
        figures=figures,
        raw=raw,
        tables=tables,
    )
    return 0 if done else 1


def _figures(case, blocks):
    """Wall and CPU of each variant in each round, over the plain DDP whose median wall is the least."""
    best = min((name for name in ("ddp", "ddp-views") if name in blocks), key=lambda name: _median(blocks[name], 0))
    seconds = _median(blocks[best], 0)
    found = [record.figure(f"{case.name}: {best}", [1000 * wall for wall, _ in blocks[best]], unit="ms")]
    for name in blocks:
        goal = ("<= 1.01" if seconds >= LONG_SECONDS else "<= 1.03") if name in OURS else None
        if name == best:
            continue
        for what, column in (("wall", 0), ("CPU", 1)):
            ratios = [ours[column] / plain[column] for ours, plain in zip(blocks[name], blocks[best], strict=True)]
            found.append(record.figure(f"{case.name}: {name}, {what}", ratios, goal=goal))
    return found


def _median(blocks, column):
    return median(block[column] for block in blocks)


def _parts(case, raw):
    """Microseconds an iteration of worker 0's main thread, by part."""
    variants = list(raw["parts"])
    parts = {part for each in raw["parts"].values() for part in each}
    rows = [[part, *(f"{1e6 * raw['parts'][name].get(part, 0.0):.0f}" for name in variants)] for part in sorted(parts)]
    return record.table(f"{case.name}: microseconds an iteration in", ["part", *variants], rows)


if __name__ == "__main__":
    sys.exit(main())
