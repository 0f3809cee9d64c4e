"""How good the sizes are that lb-bsp decides, in virtual time: no processes, no clock, no machine in the figures.

The policy of a run is asked for sizes, and told how long they took, in cases that are described (harness/scenarios.py)
and on iterations that real workers recorded (traces/sizes). A figure is the time of all iterations over that of an
oracle that knows what lasts of the slowness and not the noise, in per cent: it is below 0 where noise persists, so that
following it gains. `changes`: of sizes, by more than 2 % of an equal share, in 100 iterations.
"""

import sys
from functools import partial
from pathlib import Path

import numpy as np
from harness import record, regimes
from harness.replays import Case, Lines, least, replay
from harness.scenarios import BEGIN, ITERATIONS, SHARE, WORKERS, described, recorded, step, white

from evenstep.cluster.read import parse_cluster
from evenstep.cluster.slowness import Jitter
from evenstep.core.load import Experts, LoadOf
from evenstep.core.load.time_models import TimeModelsPolicy
from evenstep.schemes import parse_scheme
from evenstep.sim import Scenario, simulate

CONTESTANTS = {
    "lb-bsp": Experts(),
    "change_cost=0": Experts(change_cost=0.0),
    "change_cost=0.05": Experts(change_cost=0.05),
    "predictor=last": Experts(predictor="last"),
    "predictor=ema": Experts(predictor="ema"),
    "tuner=solver": LoadOf(make=TimeModelsPolicy),
}
GROUPS = (
    "constant", "equal, noise", "step", "ramp", "drift", "periodic", "bursts", "spikes", "Markov", "GPU curves",
    "free equal", "busy equal", "hog", "constantly x3",
)  # fmt: skip
ALL, EQUAL = {"100 ms": "<= 3.5", "5 ms": "<= 3.5"}, "<= 0.4"
CHANGES = (0.3, 2.0, 20.0)
CLUSTERS = Path(__file__).parents[1] / "examples/clusters"
BATCH, EXAMPLE_SHARE, SIMULATED, EPOCH_ITERATIONS = 512, 32, 1000, 50


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=10, help="of each described case, and windows of a recorded one")
    options = parser.parse_args()
    seeds = 2 if options.quick else options.seeds
    sets = {"100 ms": described(seeds, 100), "5 ms": described(seeds, 5), "recorded": recorded(min(seeds, 5))}
    raw, rows = {}, []
    for name, load in CONTESTANTS.items():
        for label, cases in sets.items():
            if label != "5 ms" or name == "lb-bsp":
                raw[f"{name}, {label}"] = {case: _judged(load, each) for case, each in cases.items()}
        record.console.print(f"  {name} done")
    for group in GROUPS:
        label = "100 ms" if any(group in case for case in sets["100 ms"]) else "recorded"
        rows.append([group, *(_cell(raw[f"{name}, {label}"], group) for name in CONTESTANTS)])
    rows += [
        [f"all, {label}", *(_cell(raw[f"{name}, {label}"], "") for name in CONTESTANTS)]
        for label in ("100 ms", "recorded")
    ]
    figures = [
        *(record.figure(f"described, all, {label}: over the oracle", [_mean(raw[f"lb-bsp, {label}"], "")],
                        goal=goal, unit="%") for label, goal in ALL.items()),
        record.figure("described, all: over the oracle, change_cost=0", [_mean(raw["change_cost=0, 100 ms"], "")],
                      goal="<= 3.5", unit="%"),
        record.figure("described, all: over the oracle, change_cost=0.05", [_mean(raw["change_cost=0.05, 100 ms"], "")],
                      goal="<= 4.5", unit="%"),
        record.figure("recorded, all: over the oracle", [_mean(raw["lb-bsp, recorded"], "")], goal="<= -0.7", unit="%"),
        record.figure("recorded, all: over the oracle, change_cost=0.05",
                      [_mean(raw["change_cost=0.05, recorded"], "")], goal="<= 0.2", unit="%"),
        record.figure("equal workers, white noise of 2 to 20 %: over the oracle",
                      [_mean(raw["lb-bsp, 100 ms"], "equal, noise")], goal=EQUAL, unit="%"),
        record.figure("recorded, equal workers: over the oracle",
                      [np.mean([_mean(raw["lb-bsp, recorded"], each) for each in ("free equal", "busy equal")])],
                      goal="<= 0.3", unit="%"),
        *_following(seeds),
        *_paying(seeds),
        *_simulated(options.seed),
    ]  # fmt: skip
    done = record.publish(
        "deciding",
        "Sizes that lb-bsp decides, over those of an oracle, in virtual time",
        options,
        config={"seeds": seeds, "iterations": ITERATIONS, "workers": WORKERS, "share": SHARE},
        figures=figures,
        raw=raw,
        tables=[record.table("% over the oracle / changes in 100 iterations", ("cases", *CONTESTANTS), rows)],
    )
    return 0 if done else 1


def _judged(load, cases):
    """By case: the time over the oracle's in per cent, and the changes in 100 iterations."""
    found = []
    for case in cases:
        sizes, spent = replay(load, case)
        share = case.total / sizes.shape[1]
        moved = np.abs(np.diff(sizes, axis=0)).max(axis=1) > max(0.02 * share, 1)
        found.append((100 * (float(spent.sum() / least(case).sum()) - 1), 100 * float(moved.mean())))
    return np.mean(found, axis=0).tolist()


def _mean(cases, group, column=0):
    return float(np.mean([found[column] for case, found in cases.items() if group in case]))


def _cell(cases, group):
    return f"{_mean(cases, group):.1f} / {_mean(cases, group, 1):.0f}"


def _following(seeds):
    """Iterations from the first slow one until two thirds of the possible gain are had, of a worker 4 times slower."""
    for milliseconds in (3, 10, 50, 300):
        for level in (0.02, 0.1):
            values = []
            for seed in range(seeds):
                case = Case(Lines(0.0, 1000 * milliseconds / SHARE), SHARE * WORKERS, white(level, seed), step(4))
                sizes, _ = replay(Experts(), case)
                took = (sizes[BEGIN:] * [1, 1, 1, 4]).max(axis=1)
                best = SHARE * WORKERS / 3.25
                values.append(int(np.argmax(took <= took[0] - 2 / 3 * (took[0] - best))))
            name = f"iterations to follow a step x4, {milliseconds} ms, noise {level:.0%}"
            yield record.figure(name, [float(np.mean(values))], goal="<= 3")


def _paying(seeds):
    """Where a change of sizes costs iterations: what it is found to cost, and the time over that with equal sizes."""
    slow = np.ones((ITERATIONS, WORKERS)) * [1.0, 1.0, 2.0, 4.0]
    for cost in CHANGES:
        make = partial(Case, Lines(0.0, 1500.0), SHARE * WORKERS)
        cases = [make(white(0.05, seed), slow, cost) for seed in range(seeds)]
        ratios = [replay(Experts(), case)[1].sum() / replay(Experts(change_cost=1e9), case)[1].sum() for case in cases]
        name = f"1:1:2:4, a change of sizes costs {cost:g} iterations: time over that of equal sizes"
        yield record.figure(name, ratios, goal="<= 0.55")


def _simulated(seed):
    """Samples/s over bsp's in the simulator: eight workers, slow by turns, and three of the example clusters."""
    for spread, goal in ((0.0, 1.6), (0.05, 1.56), (0.15, 1.46)):
        noise = [(worker, Jitter(spread=spread, seed=seed)) for worker in range(len(regimes.EQUAL)) if spread]
        cluster = regimes.cluster("episodic", seed, BATCH, noise)
        yield record.figure(f"8 workers, episodes, jitter {spread:.0%}: times bsp", [_gain(cluster)], goal=f">= {goal}")
    for name, goal in (("contended-cpus", 3.136), ("four-gpus", 4.433), ("one-delayed", 3.635)):
        cluster = parse_cluster((CLUSTERS / f"{name}.toml").read_text())
        gain = _gain(cluster, EXAMPLE_SHARE * len(cluster))
        yield record.figure(f"examples/clusters/{name}.toml: times bsp", [gain], goal=f">= {goal}")


def _gain(cluster, batch=BATCH):
    bsp, balanced = (
        simulate(
            Scenario(
                cluster=cluster,
                scheme=parse_scheme(scheme),
                global_batch_size=batch,
                iterations=SIMULATED,
                epoch_samples=EPOCH_ITERATIONS * batch,
                message_bytes=cluster.gradient_bytes,
            )
        )
        for scheme in ("bsp", "lb-bsp")
    )
    return balanced.samples_per_second / bsp.samples_per_second


if __name__ == "__main__":
    sys.exit(main())
