"""One exchange with a parameter server, side by side: push gradients, SGD update on the server, pull the weights.

Every contestant starts one server and the workers of a case on this host, and all workers exchange at once for some
seconds. Contestants take turns, in rounds, in alternating order; ratios are of the same round. MB/s counts both
directions: twice the model's bytes for each exchange.
"""

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median

from contestants import bare_sockets, evenstep, memory_copy, native, ps_lite
from contestants.case import Case
from harness import environments, record

LARGE = [(size, workers) for size in (25_000_000, 100_000_000) for workers in (1, 4, 8)]
SMALL = [(100_000, 1), (100_000, 4)]
"""Bytes of the model and workers: of the first, megabytes count, of the second, exchanges."""
SOCKETS = (
    "bare sockets, TCP",
    "bare sockets, TCP, whole replies",
    "bare sockets, Unix",
    "bare sockets, Unix, whole replies",
)
"""A whole reply has the weights of one version, as evenstep's have; the others may mix those of two updates."""
PS_LITE = ("ps-lite, one key", "ps-lite, model keys")
REFERENCES = {**{name: (name,) for name in SOCKETS}, "memory copy": ("memory copy",), "ps-lite": PS_LITE}
"""What evenstep is compared with: the fastest of these contestants, by its median in the case."""
GOALS = {
    "evenstep, network": {**dict.fromkeys(SOCKETS[:2], ">= 0.9"), "ps-lite": ">= 2"},
    "evenstep, shared memory": {**dict.fromkeys(SOCKETS, ">= 1.4"), "ps-lite": ">= 4"},
}
"""For every large model, over which reference: the network path over the same network."""
IN_A_SCRIPT = "evenstep, in a script"
NATIVE = "C, shared memory"
OF_SMALL_MODELS = (IN_A_SCRIPT, NATIVE)
"""Where the time that each exchange takes counts, beside that of its bytes."""
SMALL_GOALS = {"evenstep, network": ">= 3000", "evenstep, shared memory": ">= 4000", IN_A_SCRIPT: ">= 4000"}


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="timed in every measurement")
    parser.add_argument(
        "--environments", type=Path, default=environments.DEFAULT, help="where MXNet's environment is, or is made"
    )
    parser.add_argument("--cases", choices=("all", "large", "small"), default="all")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contestants whose names begin so")
    options = parser.parse_args()
    large, small = (
        [] if options.cases == left_out else cases for left_out, cases in (("small", LARGE), ("large", SMALL))
    )
    cases = large + small
    if options.quick:
        cases, options.rounds, options.seconds = large[:2] + small, 1, 1.0
    contestants, skipped = _contestants(options)
    raw = {_name(case): _empty(contestants, case) for case in cases}
    for number in range(options.rounds):
        for case in cases:
            names = list(raw[_name(case)])
            for name in reversed(names) if number % 2 else names:
                measured = _measure(contestants[name], case, options.seconds)
                raw[_name(case)][name].append(measured)
                record.console.print(
                    f"  {number + 1}/{options.rounds} {_name(case)}, {name}: {measured[_unit(case)]:.0f} {_unit(case)}"
                )
    done = record.publish(
        "exchange" if options.cases == "all" else f"exchange-{options.cases}",
        "Push, SGD update and pull with one server on this host",
        options,
        config={
            "rounds": options.rounds,
            "seconds": options.seconds,
            "cases": {_name(case): {"model_bytes": case[0], "workers": case[1]} for case in cases},
            "megabytes": "2 x model bytes x exchanges / 1e6",
            "socket_buffer_bytes": bare_sockets.BUFFER_BYTES,
            "ps_lite": {"requirements": ps_lite.REQUIREMENTS, "skipped": skipped},
        },
        figures=[each for case in cases for each in _figures(case, raw[_name(case)])],
        raw=raw,
    )
    return 0 if done else 1


def _contestants(options):
    """By name, a function of a `Case` that returns a `Measured`; and why ps-lite is not among them, where it is not."""
    every = {
        "evenstep, network": evenstep.over_network,
        "evenstep, shared memory": evenstep.over_shared_memory,
        IN_A_SCRIPT: evenstep.in_a_script,
        "bare sockets, TCP": bare_sockets.over_tcp,
        "bare sockets, Unix": bare_sockets.over_unix,
        "bare sockets, TCP, whole replies": bare_sockets.over_tcp_whole,
        "bare sockets, Unix, whole replies": bare_sockets.over_unix_whole,
        "memory copy": memory_copy.measure,
        NATIVE: native.measure,
    }
    every |= {name: partial(ps_lite.measure, layout=name.removeprefix("ps-lite, ")) for name in PS_LITE}
    chosen = {name: one for name, one in every.items() if not options.only or name.startswith(tuple(options.only))}
    if not any(name in PS_LITE for name in chosen):
        return chosen, "not asked for"
    try:
        python = environments.environment("mxnet", ps_lite.REQUIREMENTS, options.environments, record.console.print)
    except RuntimeError as error:
        record.console.print(f"without ps-lite: {error}")
        return {name: one for name, one in chosen.items() if name not in PS_LITE}, str(error)
    return {name: partial(one, python=python) if name in PS_LITE else one for name, one in chosen.items()}, None


def _measure(contestant, case, seconds):
    model_bytes, workers = case
    measured = contestant(Case(model_bytes=model_bytes, workers=workers, seconds=seconds))
    pace = measured.exchanges_per_second
    return {"exchanges/s": pace, "MB/s": 2 * model_bytes * pace / 1e6, **asdict(measured)}


def _figures(case, of_case):
    unit = _unit(case)
    paces = {name: [each[unit] for each in measured] for name, measured in of_case.items()}
    goals = SMALL_GOALS if case in SMALL else {}
    figures = [
        record.figure(f"{_name(case)}: {name}", pace, unit=unit, goal=goals.get(name)) for name, pace in paces.items()
    ]
    for reference, members in REFERENCES.items():
        raced = [name for name in members if name in paces]
        if not raced:
            continue
        fastest = max(raced, key=lambda name: median(paces[name]))
        figures += [
            record.figure(
                f"{_name(case)}: {name}, times {fastest}",
                [ours / theirs for ours, theirs in zip(paces[name], paces[fastest], strict=True)],
                goal=None if case in SMALL else wanted.get(reference),
            )
            for name, wanted in GOALS.items()
            if name in paces
        ]
    return figures


def _name(case):
    model_bytes, workers = case
    size = f"{model_bytes // 10**6} MB" if model_bytes >= 10**6 else f"{model_bytes // 10**3} KB"
    return f"{size}, {workers} worker{'s' if workers > 1 else ''}"


def _unit(case):
    return "exchanges/s" if case in SMALL else "MB/s"


def _empty(contestants, case):
    return {name: [] for name in contestants if name not in OF_SMALL_MODELS or case in SMALL}


if __name__ == "__main__":
    sys.exit(main())
