"""Servers on two hosts: a group server on each against one flat server, and one, two or four shards of a large model.

Two network namespaces are the hosts, with a cable of 1 Gbit/s or 200 Mbit/s between them (token bucket filters), and
half of the workers are on each. The model takes no time to compute, so an iteration is its exchange. Encryption is on,
as between real hosts; everything shares this machine's two cores. Contestants take turns, in alternating order.
Exchanges of all workers are counted in the same seconds, in which all of them exchange.
"""

import json
import sys
import tempfile
from pathlib import Path

from harness import record
from harness.hosts import run_workers, two_hosts

SCRIPT = Path(__file__).parent / "harness/hosts_worker.py"
MEGABITS, WORKERS = (1000, 200), (4, 8)
GROUPED = {
    "flat, barrier": "grouped:groups=hosts,across=bsp,push_to=root",
    "group server, barrier": "grouped:groups=hosts,across=bsp",
    "flat, asynchronous groups": "grouped:groups=hosts,push_to=root",
    "group server, asynchronous groups": "grouped:groups=hosts",
    "no server": "bsp",
}
SHARDS = {count: f"asp:servers={count}" for count in (1, 2, 4)}
GROUPED_BYTES, SHARDS_BYTES = 25_000_000, 100_000_000


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="timed in every measurement")
    options = parser.parse_args()
    cases = [("groups", megabits, workers) for megabits in MEGABITS for workers in WORKERS]
    cases += [("shards", 1000, workers) for workers in WORKERS]
    if options.quick:
        cases, options.rounds = [cases[0], cases[-1]], 1
    raw = {}
    for case in cases:
        raw[_name(case)] = _measure(case, options)
    done = record.publish(
        "server_hosts",
        "Group servers and shards on two hosts",
        options,
        config={
            "rounds": options.rounds,
            "seconds": options.seconds,
            "model_bytes": {"groups": GROUPED_BYTES, "shards": SHARDS_BYTES},
            "schemes": GROUPED | {f"{count} shards": scheme for count, scheme in SHARDS.items()},
        },
        figures=[each for case in cases for each in _figures(case, raw[_name(case)])],
        raw=raw,
    )
    return 0 if done else 1


def _measure(case, options):
    kind, megabits, workers = case
    schemes, model_bytes = (GROUPED, GROUPED_BYTES) if kind == "groups" else (SHARDS, SHARDS_BYTES)
    found = {str(name): [] for name in schemes}
    with two_hosts(megabits) as hosts:
        for number in range(options.rounds):
            names = list(schemes)
            for name in reversed(names) if number % 2 else names:
                pace, _ = pace_of(hosts, workers, schemes[name], model_bytes, options.seconds)
                found[str(name)].append(pace)
                record.console.print(f"  {number + 1}/{options.rounds} {_name(case)}, {name}: {pace:.3f} exchanges/s")
    return found


def pace_of(hosts, workers, scheme, model_bytes, seconds):
    """Exchanges per second of all workers together, and the bytes per second that the first host sends the other."""
    with tempfile.TemporaryDirectory() as folder:
        words = [str(SCRIPT), scheme, "--bytes", str(model_bytes), "--seconds", str(seconds), "--out", folder]
        run_workers(hosts, workers, words, 600)
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
        stop = json.loads((Path(folder) / "stop").read_text())
        begin, end = stop["window"]
    if len(found) != workers:
        raise RuntimeError(f"{scheme}: {len(found)} of {workers} workers measured")
    return sum(begin < step <= end for steps in found for step in steps) / (end - begin), stop["sent"] / (end - begin)


def _figures(case, found):
    ratios = (
        {"group server, barrier": "flat, barrier", "group server, asynchronous groups": "flat, asynchronous groups",
         "no server": "flat, barrier"}
        if case[0] == "groups" else {"2": "1", "4": "1"}
    )  # fmt: skip
    for name, paces in found.items():
        yield record.figure(f"{_name(case)}: {name}, exchanges/s", paces)
    for name, base in ratios.items():
        values = [one / other for one, other in zip(found[name], found[base], strict=True)]
        yield record.figure(f"{_name(case)}: {name}, over {base}", values)


def _name(case):
    kind, megabits, workers = case
    return f"{kind}, {workers} workers, {megabits} Mbit/s"


if __name__ == "__main__":
    sys.exit(main())
