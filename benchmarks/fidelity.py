"""Is the simulator right? The same scenarios trained for real on emulated devices, and simulated.

Workers, disturbances, schemes, sizes and epochs are the same on both sides. What an exchange takes and by how much that
varies, which nobody emulates, is fitted on two other runs, of equal workers, one with servers and one without. Both
sides write the same event log, and the same code takes samples/s, waiting shares and sizes from it.

A cell is simulated with several draws of the exchanges. Where these decide what comes out (who gets an epoch's last
claims, and DSSP among equal workers), it is trained several times too, and means are compared.
"""

import itertools
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median, pstdev

import numpy as np
import torch
import torch.distributed as dist
from harness import clusters, record, served
from harness.serving import served as serving
from harness.workers import run_workers
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep.cluster.slowness import Episodic, From, Jitter
from evenstep.schemes import parse_scheme
from evenstep.sim import Log, Scenario, simulate
from evenstep.telemetry import JsonlRecorder, Silent, read_events
from evenstep.telemetry.events import IterationDone

WORKERS, BATCH, SECONDS = 4, 64, 0.2
"""Workers, samples of a global batch, and its seconds if nobody ever waited."""
EPOCHS, EPOCH_ITERATIONS = 3, 20
SCENARIOS = {
    "persistent": "speeds 1:1:2:4, lasting",
    "episodic": "equal workers, each 3x slower in episodes of 4 to 12 iterations, one in every 30",
    "jitter": "equal workers, jitter of 10 %",
    "change": "speeds 1:1:2:4, until the fastest becomes 4x slower in its 20th iteration",
}
SCHEMES = (
    "bsp", "lb-bsp", "lb-bsp:predictor=ema", "dbs", "local-sgd:period=5",
    "ssp:bound=3", "dssp:lower=3,upper=15", "asp", "ssp:bound=3,load=lb-bsp:predictor=ema",
)  # fmt: skip
PERIODS = (
    "local-sgd:period=2", "diloco:period=2", "diloco:period=2,steps=speed",
    "asp:period=2", "asp:period=2,steps=speed", "grouped:groups=2,period=2",
)  # fmt: skip
"""Local steps, a record of their own."""
FITTED_ON = {"collective": "bsp", "server": "asp"}
DRAWS, REPETITIONS, CHANCE = 6, 4, 0.005
"""Simulations of a cell; trainings of one where the standard deviation of any compared figure is beyond this."""
DECIDED = ("samples", "staleness", "lead")
GOAL = "<= 0.03"


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--periods", action="store_true", help="those of local steps instead")
    options = parser.parse_args()
    if options.periods:
        options.schemes = list(PERIODS)
    epochs = 1 if options.quick else EPOCHS
    cells = list(itertools.product(options.scenarios, options.schemes))
    fits = [("equal", scheme) for scheme in FITTED_ON.values()]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        _train_all([(*fit, 0) for fit in fits], folder, epochs, options.seed)
        # What an iteration of equal workers takes beyond its compute and its waiting.
        exchange = {engine: _beyond(_folder(folder, "equal", scheme, 0)) for engine, scheme in FITTED_ON.items()}
        record.console.print(f"  an exchange takes {exchange}")
        simulated = {
            cell: [
                _simulated(*cell, epochs, exchange, Path(folder) / "simulated", options.seed, draw)
                for draw in range(DRAWS)
            ]
            for cell in cells
        }
        repetitions = {cell: REPETITIONS if _by_chance(simulated[cell]) else 1 for cell in cells}
        _train_all(
            [(*cell, number) for cell in cells for number in range(repetitions[cell])], folder, epochs, options.seed
        )
        rows = []
        for cell in cells:
            real = [_observed(_folder(folder, *cell, number)) for number in range(repetitions[cell])]
            rows.append(
                {"scenario": cell[0], "scheme": cell[1], "trained": len(real), **_compared(real, simulated[cell])}
            )
    record.console.print(f"  {len(cells)} cells in {(time.monotonic() - began) / 60:.1f} minutes")
    done = record.publish(
        "fidelity-periods" if options.periods else "fidelity",
        f"Simulated against trained, {WORKERS} workers",
        options,
        config={
            "workers": WORKERS, "global_batch_size": BATCH, "ideal_seconds": SECONDS,
            "epochs": epochs, "epoch_iterations": EPOCH_ITERATIONS,
            "scenarios": {name: SCENARIOS[name] for name in options.scenarios}, "schemes": options.schemes,
            "exchange_fitted_on_equal_workers": {**exchange, "schemes": FITTED_ON},
            "simulations_of_a_cell": DRAWS,
            "trainings_where_chance_decides": REPETITIONS,
            "waiting": "the part of the workers' time that was neither compute nor the exchange itself",
            "sizes": "each worker's mean size over the run; the largest difference, over the mean size of all",
        },
        figures=[
            record.figure("samples/s, off by", [abs(row["samples_per_second_off"]) for row in rows], goal=GOAL),
            record.figure("waiting share, off by", [abs(row["waiting_off"]) for row in rows], goal=GOAL),
            record.figure("sizes, off by", [row["sizes_off"] for row in rows], goal=GOAL),
            record.figure("cells within 3 % in all three", [fmean(_within(row) for row in rows)], goal=">= 1"),
        ],
        tables=[_table(name, [row for row in rows if row["scenario"] == name]) for name in options.scenarios],
        raw=rows,
    )  # fmt: skip
    return 0 if done else 1


def _cluster(name, seed):
    speeds = (1, 1, 2, 4) if name in ("persistent", "change") else (1, 1, 1, 1)
    episodes = Episodic(factor=3.0, period=30, shortest=4, longest=12, seed=seed)
    jitter = Jitter(spread=0.1, seed=seed)
    disturbances = {
        "episodic": [(worker, episodes) for worker in range(WORKERS)],
        "jitter": [(worker, jitter) for worker in range(WORKERS)],
        "change": [(WORKERS - 1, From(factor=4.0, first=20))],
    }.get(name, [])
    return clusters.cluster_of(clusters.proportional(speeds, BATCH, SECONDS), disturbances)


def _folder(folder, name, scheme, number):
    return Path(folder) / f"{name}-{scheme}-{number}".replace(":", "_").replace("=", "_").replace(",", "_")


# For real.


def _train_all(runs, folder, epochs, seed):
    """Each of (scenario, scheme, number), which leaves its log in a folder of its own."""
    plan = [
        (name, scheme, _cluster(name, seed), _folder(folder, name, scheme, number)) for name, scheme, number in runs
    ]
    run_workers(WORKERS, _all_real, (plan, epochs, seed), record.console.print)


def _all_real(rank, argument, tell):
    plan, epochs, seed = argument
    for number, (name, scheme, cluster, run_dir) in enumerate(plan, start=1):
        with serving(scheme, run_dir):
            took = _train(rank, scheme, cluster, epochs, run_dir, seed)
        tell(f"  {number}/{len(plan)} {name}, {scheme}: {took:.1f} s")


def _train(rank, scheme, cluster, epochs, folder, seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(served.FEATURES, served.CLASSES)
    samples = BATCH * EPOCH_ITERATIONS
    inputs, targets = torch.randn(samples, served.FEATURES), torch.zeros(samples, dtype=torch.int64)
    model, optimizer, loader = evenstep.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        DataLoader(TensorDataset(inputs, targets), batch_size=BATCH // WORKERS, shuffle=False),
        scheme=scheme,
        seed=seed,
        emulate=cluster,
        run_dir=folder,
    )
    dist.barrier()
    began = time.perf_counter()
    for _ in range(epochs):
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    ended = time.perf_counter() - began
    dist.barrier()
    loader.close()
    took = [None] * WORKERS
    dist.all_gather_object(took, ended)
    if rank == 0:
        (folder / "seconds").write_text(repr(max(took)))
    return max(took)


# In virtual time.


def _simulated(name, scheme, epochs, exchange, folder, seed, draw):
    engine = "collective" if parse_scheme(scheme).served is None else "server"
    cluster = _cluster(name, seed)
    scenario = Scenario(
        # The cluster's seed draws the exchanges and nothing else here: disturbances have theirs.
        cluster=replace(cluster, seed=cluster.seed + draw),
        scheme=parse_scheme(scheme),
        global_batch_size=BATCH,
        iterations=epochs * EPOCH_ITERATIONS,
        epoch_samples=BATCH * EPOCH_ITERATIONS,
        exchange_seconds=exchange[engine]["seconds"],
        exchange_spread=exchange[engine]["spread"],
    )
    shutil.rmtree(folder, ignore_errors=True)
    log = Log(
        workers=[JsonlRecorder(folder, worker) for worker in range(WORKERS)],
        server=Silent() if engine == "collective" else JsonlRecorder(folder, 0, role="server"),
    )
    run = simulate(scenario, log=log)
    log.close()
    (folder / "seconds").write_text(repr(run.seconds))
    return _observed(folder)


# From the log of either.


def _observed(folder):
    """What a run's log says of it."""
    events = list(read_events(folder, kind=IterationDone))
    seconds = float((folder / "seconds").read_text())
    by_worker = [[event for event in events if event.worker == worker] for worker in range(WORKERS)]
    compute = [sum(event.compute_seconds for event in each) for each in by_worker]
    return {
        "samples_per_second": sum(event.samples for event in events) / seconds,
        "not_compute": 1.0 - sum(compute) / (WORKERS * seconds),
        "iterations": [len(each) for each in by_worker],
        "sizes": [fmean(event.samples for event in each) for each in by_worker],
        "seconds": seconds,
        "compute": compute,
        # What was decided, iteration by iteration: of each worker its samples, staleness and lead.
        "trace": [[[getattr(event, name) for name in DECIDED] for event in each] for each in by_worker],
    }


def _beyond(folder):
    """What an iteration of a run takes beyond its compute and its waiting: the median, and its relative spread.

    Of the spread a robust estimate, 1.4826 times the median distance from the median: a machine with other work on it
    has a few exchanges that take twenty times as long.
    """
    beyond = [
        event.iteration_seconds - event.compute_seconds - event.wait_seconds
        for event in read_events(folder, kind=IterationDone)
    ]
    seconds = median(beyond)
    return {"seconds": seconds, "spread": 1.4826 * median(abs(each - seconds) for each in beyond) / seconds}


def _by_chance(simulated):
    rates = [each["samples_per_second"] for each in simulated]
    sizes = np.array([each["sizes"] for each in simulated])
    return (
        pstdev(rates) > CHANCE * fmean(rates)
        or pstdev(each["not_compute"] for each in simulated) > CHANCE
        or bool((sizes.std(axis=0) > CHANCE * sizes.mean()).any())
    )


def _mean(runs):
    """The figures of several runs of a cell, averaged."""
    return {
        name: np.mean([run[name] for run in runs], axis=0).tolist()
        for name in ("samples_per_second", "not_compute", "sizes", "seconds", "compute")
    } | {"each_samples_per_second": [run["samples_per_second"] for run in runs]}


def _compared(several_real, several_simulated):
    same = several_real[0]["trace"] == several_simulated[0]["trace"]
    real, simulated = _mean(several_real), _mean(several_simulated)
    mean_size = fmean(real["sizes"])
    return {
        "real": real,
        "simulated": simulated,
        "samples_per_second_off": simulated["samples_per_second"] / real["samples_per_second"] - 1.0,
        "waiting_off": simulated["not_compute"] - real["not_compute"],
        "sizes_off": float(np.max(np.abs(np.subtract(simulated["sizes"], real["sizes"])))) / mean_size,
        "same_traces": same,
    }


def _within(row):
    return all(abs(row[name]) <= 0.03 for name in ("samples_per_second_off", "waiting_off", "sizes_off"))


def _table(name, rows):
    headings = (
        "scheme",
        "samples/s",
        "simulated",
        "off",
        "waiting",
        "simulated",
        "off",
        "sizes",
        "simulated",
        "traces",
    )
    return record.table(
        f"{name}: {SCENARIOS[name]}",
        headings,
        [
            [
                row["scheme"] + (f" ({row['trained']} runs)" if row["trained"] > 1 else ""),
                f"{row['real']['samples_per_second']:.1f}",
                f"{row['simulated']['samples_per_second']:.1f}",
                f"{row['samples_per_second_off']:+.1%}",
                f"{row['real']['not_compute']:.1%}",
                f"{row['simulated']['not_compute']:.1%}",
                f"{row['waiting_off']:+.1%}",
                " ".join(f"{size:.1f}" for size in row["real"]["sizes"]),
                " ".join(f"{size:.1f}" for size in row["simulated"]["sizes"]),
                "equal" if row["same_traces"] else "differ",
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
