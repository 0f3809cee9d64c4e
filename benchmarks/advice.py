"""Advice from 50 iterations, judged by longer runs on clusters on which it was not tuned.

Simulated: clusters are drawn from the seed, a run of 50 iterations under lb-bsp is simulated on each with one seed of
its jitter and episodes, `evenstep plan` reads that run alone, and every scheme is then simulated for longer with
other seeds. With --real, small clusters are emulated: processes, DDP and Gloo record the run and measure the schemes.
"""

import sys
import tempfile
from contextlib import closing
from pathlib import Path

from harness import drawn, record, segments

from evenstep.advice import advise, measured_machines
from evenstep.advice.advise import EXACT, PLAIN, STALE
from evenstep.report.recorded import read_run
from evenstep.schemes import parse_scheme
from evenstep.sim import Log, Scenario, simulate
from evenstep.telemetry import JsonlRecorder, Silent

CLUSTERS, RECORDED, LENGTH, EPOCH = 20, 50, 500, 100
"""How many clusters; iterations of the run that is read, of each that judges, and of an epoch."""
OTHERS = (1, 2, 3, 4, 5)
"""The seeds of what is measured; that of the run is 0."""
CLOSE = 0.05
PICKED, PREDICTED = ">= 18", ">= 16"
REAL = {"clusters": 4, "iterations": 80, "milliseconds": 25}
SMALL = (2, 4, 3, 4)
"""Workers of the emulated clusters."""


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--real", action="store_true", help="a few clusters with processes on emulated devices")
    parser.add_argument("--scheme", default="lb-bsp", help="of the run that is read (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=RECORDED, help="of that run (default: %(default)s)")
    options = parser.parse_args()
    usual = options.scheme == "lb-bsp" and options.iterations == RECORDED
    rows = _real(options) if options.real else _simulated(options)
    name = "advice-real" if options.real else "advice" if usual else f"advice-{options.scheme}-{options.iterations}"
    kind = "processes on emulated devices" if options.real else "simulated"
    done = record.publish(
        name,
        f"Advice from {options.iterations} iterations under {options.scheme}, {len(rows)} clusters, {kind}",
        options,
        config={
            "recorded_iterations": options.iterations, "scheme": options.scheme, "simulated": not options.real,
            "measured_iterations": REAL["iterations"] if options.real else LENGTH, "seeds": OTHERS,
            "epoch_iterations": EPOCH, "schemes": EXACT if options.real else (*EXACT, *STALE),
            "clusters": [row["about"] for row in rows],
        },
        figures=_figures(rows, stale=not options.real, goals=len(rows) == CLUSTERS and usual),
        tables=[_table(rows, stale=not options.real)],
        raw=rows,
        overrun=record.overruns({str(row["about"]["number"]): row["segments"] for row in rows})
        if options.real else None,
    )  # fmt: skip
    return 0 if done else 1


# In virtual time.


def _simulated(options):
    rows = []
    for number in range(2 if options.quick else CLUSTERS):
        one = drawn.draw(options.seed, number)
        with tempfile.TemporaryDirectory() as folder:
            _record_run(one, options.scheme, Path(folder), options.iterations)
            advice = advise(measured_machines(read_run(Path(folder))))
        measured = {name: _samples_per_second(one, name, options.quick) for name in (*EXACT, *STALE)}
        rows.append(_row(one, advice, measured))
    return rows


def _record_run(one, scheme, folder, iterations=RECORDED):
    workers = [JsonlRecorder(folder, rank) for rank in range(len(one.cluster))]
    served = parse_scheme(scheme).served is not None
    server = JsonlRecorder(folder, 0, role="server") if served else Silent()
    with closing(Log(workers=workers, server=server)) as log:
        simulate(_scenario(one, scheme, iterations, 0), log=log)


def _samples_per_second(one, scheme, quick):
    runs = [simulate(_scenario(one, scheme, LENGTH // (5 if quick else 1), seed)) for seed in OTHERS]
    return sum(run.samples for run in runs) / sum(run.seconds for run in runs)


def _scenario(one, scheme, iterations, seed):
    return Scenario(
        cluster=one.with_seed(seed), scheme=parse_scheme(scheme), global_batch_size=one.global_batch_size,
        iterations=iterations, epoch_samples=EPOCH * one.global_batch_size, message_bytes=one.message_bytes,
    )  # fmt: skip


# For real.


def _real(options):
    rows, length = [], REAL["iterations"] // (5 if options.quick else 1)
    for number in range(1 if options.quick else REAL["clusters"]):
        one = drawn.draw(
            options.seed, number, workers=SMALL[number], milliseconds=REAL["milliseconds"], links=False
        )  # fmt: skip
        record.console.print(f"  cluster {number}: {one.about}")
        with tempfile.TemporaryDirectory() as folder:
            variants = [segments.Variant(name="run", scheme=options.scheme, iterations=RECORDED, only=(0,))]
            variants += [
                segments.Variant(
                    name=f"{name} {seed}", scheme=name, iterations=length, epoch_iterations=length // 2,
                    cluster=one.with_seed(seed), only=(0,),
                )
                for seed in OTHERS[:2] for name in EXACT
            ]  # fmt: skip
            plan = segments.Plan(
                cluster=one.with_seed(0), global_batch_size=one.global_batch_size, variants=tuple(variants),
                repetitions=1, seed=options.seed, run_dir=folder,
            )  # fmt: skip
            done = segments.run(plan, record.console.print)
            advice = advise(measured_machines(read_run(Path(folder) / "run-0")))
        measured = {}
        for name in EXACT:
            runs = [done[f"{name} {seed}"][0] for seed in OTHERS[:2]]
            measured[name] = len(runs) * length * one.global_batch_size / sum(run["seconds"] for run in runs)
        counted = [{key: each[0][key] for key in ("overrun_iterations", "iterations")} for each in done.values()]
        rows.append(_row(one, advice, measured) | {"segments": counted})
    return rows


# What is shown.


def _row(one, advice, measured):
    """What was advised for one cluster, and what is true of it."""
    exact = {name: speed for name, speed in measured.items() if name in EXACT}
    picked = advice.pick.scheme
    fastest = picked if advice.stale is None else advice.stale.scheme
    # Advice that nothing is to be gained is judged by what the best exact scheme gains.
    truth = exact[picked] if picked != PLAIN else max(exact.values())
    predicted, gained = advice.speed_up(advice.pick), truth / exact[PLAIN]
    row = {
        "about": {"number": one.number, **one.about}, "advice": advice.values, "measured": measured, "pick": picked,
        "pick_over_best_exact": exact[picked] / max(exact.values()),
        "pick_over_best": measured[picked] / max(measured.values()),
        "predicted_gain": predicted, "gain": gained, "off": abs(predicted / gained - 1),
        "stale": None if advice.stale is None else advice.stale.scheme,
    }  # fmt: skip
    if set(measured) > set(EXACT):
        row["named_over_best"] = max(measured[picked], measured[fastest]) / max(measured.values())
        # By its own figures, the advice could name the fastest scheme whatever it gains.
        named = max(advice.runs, key=lambda each: each.samples_per_second).scheme
        row["fastest_over_best"] = measured[named] / max(measured.values())
    return row


def _figures(rows, *, stale, goals):
    def close(key):
        return [sum(row[key] >= 1 - CLOSE for row in rows)]

    figures = [
        record.figure("pick within 5 % of the best exact scheme, clusters", close("pick_over_best_exact"),
                      goal=PICKED if goals else None),
    ]  # fmt: skip
    if stale:
        figures += [
            record.figure("pick or the stale scheme beside it within 5 % of the best of all, clusters",
                          close("named_over_best"), goal=PICKED if goals else None),
            record.figure("the fastest of its figures within 5 % of the best of all, clusters",
                          close("fastest_over_best")),
            record.figure("pick alone within 5 % of the best of all, clusters", close("pick_over_best")),
        ]  # fmt: skip
    return [
        *figures,
        record.figure("predicted gain within 5 % of the measured, clusters",
                      [sum(row["off"] <= CLOSE for row in rows)], goal=PREDICTED if goals else None),
        *_by_episodes(rows),
        record.figure("predicted gain, off by", [100 * row["off"] for row in rows], unit="%"),
        record.figure("gain of the pick over bsp, measured", [row["gain"] for row in rows], unit="times as fast"),
    ]  # fmt: skip


def _by_episodes(rows):
    """The same where nothing lasting changes within a run, and where episodes come that a short run may not show."""
    figures = []
    for kind, wanted in (("without episodes", False), ("with episodes", True)):
        here = [row for row in rows if (row["about"]["episodes"] is not None) == wanted]
        if here:
            name = f"of these {kind}, {len(here)} clusters"
            figures += [record.figure(name, [sum(row["off"] <= CLOSE for row in here)])]
    return figures


def _table(rows, *, stale):
    headings = ("cluster", "jitter", "episodes", "pick", "gain", "predicted", "over best exact")
    headings += ("stale beside it", "over best of all") if stale else ()
    return record.table("Each cluster; gains in times over bsp", headings, [_cells(row, stale) for row in rows])


def _cells(row, stale):
    about = row["about"]
    cells = [
        f"{about['number']}: {about['kind']}, {about['workers']}", f"{about['jitter']:.0%}",
        "" if about["episodes"] is None else f"{about['episodes']['workers']} x {about['episodes']['factor']:.1f}",
        row["pick"], f"{row['gain']:.2f}", f"{row['predicted_gain']:.2f}", f"{row['pick_over_best_exact']:.3f}",
    ]  # fmt: skip
    return [*cells, row["stale"] or "", f"{row['named_over_best']:.3f}"] if stale else cells


if __name__ == "__main__":
    sys.exit(main())
