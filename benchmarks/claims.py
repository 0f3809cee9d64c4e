"""The headlines of the five papers, reproduced or refuted: simulated here, or measured by a script beside this one.

    python benchmarks/claims.py                  all of them: about an hour and a half
    python benchmarks/claims.py --claim dbs      one
    python benchmarks/claims.py --recorded       measured figures from the records in results/, whose commits are shown

docs/claims.md says how each figure comes about, and why one differs from its paper's.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from harness import clusters, record

from evenstep.cluster import parse_cluster
from evenstep.cluster.slowness import AffineCurve
from evenstep.schemes import parse_scheme
from evenstep.sim import Scenario, simulate

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples/clusters"
R2SP_SECONDS = {"K520": 2.3349e-3, "K80": 1.58689e-3, "M60": 1.095636e-3}
"""Per sample of ResNet-32 on CIFAR-10, from the code of R2SP's authors (INFOCOM 2019, Table II)."""
SEEN = """
seed = {seed}
[devices.cpu]
per_sample = "1 ms"
[disturbances.others]
kind = "episodic"
factor = 3
period = {period}
shortest = {shortest}
longest = {longest}
takes = "{takes}"
[disturbances.noise]
kind = "jitter"
spread = "5 %"
[[workers]]
device = "cpu"
disturb = ["others", "noise"]
count = 4
"""
"""Four workers whose processors or memories other processes take now and then."""
MIX = {"K520": 4, "K80": 4, "M60": 8}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure: what the paper says, what was found, and which values count as the same."""

    name: str
    paper: str
    values: list[float]
    goal: str
    how: str


def lb_bsp_two_times(records):
    """LB-BSP (arXiv 1806.02508): up to twice as fast as BSP."""
    for name, file, batch in (("eight GPUs of R2SP", "r2sp", 8 * 512), ("four measured GPUs", "four-gpus", 512)):
        cluster = parse_cluster((EXAMPLES / f"{file}.toml").read_text())
        yield Row(
            name=f"{name}: lb-bsp's samples/s over bsp's",
            paper="up to 2",
            values=[_gain(cluster, "lb-bsp", batch=batch)],
            goal=f">= {0.95 * _allowed(cluster, batch):.3g}",
            how="simulated",
        )
    yield records.row(
        "times plain DDP with equal sizes", "up to 2", ">= 1.9", "steady.py", "--workers", "4", name="steady-4"
    )


def lb_bsp_gpus(records):
    """LB-BSP (SoCC 2020, TCC 2021), GPU cluster: up to 54 %. Its 16 GPUs are not known; these are R2SP's kinds."""
    seconds = [R2SP_SECONDS[kind] for kind, count in MIX.items() for _ in range(count)]
    cluster = clusters.cluster_of([AffineCurve(seconds_per_sample=each) for each in seconds])
    gain = _gain(cluster, "lb-bsp", batch=16 * 512)
    yield Row(
        name="16 GPUs, 4 K520, 4 K80, 8 M60: lb-bsp's samples/s over bsp's",
        paper="1.54, or 2.17 if 54 % is of the time",
        values=[gain],
        goal=">= 1.54",
        how="simulated",
    )


def lb_bsp_cpus(records):
    """The same, CPU cluster: up to 38.7 %, under contention."""
    for scenario in ("hog", "by-turns", "quota"):
        for variant in ("lb-bsp", "lb-bsp, ema", "lb-bsp, narx"):
            yield records.row(f"{scenario}: {variant}, of the gain allowed", "-", ">= 0.93", "contention.py")
    yield records.row("hog: lb-bsp, times plain DDP", "up to 1.39", ">= 1.387", "contention.py", "--scenarios", "hog",
                    "--iterations", "60", name="contention-hog")  # fmt: skip


def narx(records):
    """LB-BSP v1: NARX predicts speeds best, with the use of processor and memory as driving factors."""
    for takes, shortest, longest in (
        ("processor", 2, 6),
        ("memory", 2, 6),
        ("processor", 5, 20),
        ("processor", 10, 200),
    ):
        values = [_narx_gain(takes, shortest, longest, seed) for seed in range(3)]
        yield Row(
            name=f"others take the {takes} for {shortest} to {longest} iterations: narx over the default predictor",
            paper="above 1",
            values=values,
            goal=">= 1.01",
            how="simulated",
        )
    for trace in ("processor, in proportion", "processor, on and off", "memory, pressure below a quarter"):
        yield records.row(f"NARX / EMA, {trace}", "below 1", "<= 0.8", "predictors.py")
    for scenario in ("hog", "by-turns"):
        best = records.figure(f"{scenario}: lb-bsp, of the gain allowed", "contention.py")
        own = records.figure(f"{scenario}: lb-bsp, narx, of the gain allowed", "contention.py")
        yield Row(
            name=f"{scenario}, end to end: narx over the default predictor",
            paper="above 1",
            values=[own["median"] / best["median"]],
            goal=">= 1.01",
            how=records.how("contention.py"),
        )


def federated(records):
    """LB-BSP (TCC 2021), federated: 0.69 of the time to the same accuracy; the two comparisons lose accuracy."""
    found = records.of("federated.py")["figures"]
    for each in found:
        if each["goal"] is not None:
            paper = "-" if "dssp" in each["figure"] else "0.69" if "time" in each["figure"] else "0"
            yield records.row(each["figure"], paper, each["goal"], "federated.py")


def dbs(records):
    """DBS (arXiv 2007.11831): three workers on one GPU and one on another train in about 0.65 of the time, also where
    workers are slowed for whole epochs; the accuracy is the same."""
    shared = clusters.cluster_of([AffineCurve(seconds_per_sample=each) for each in (3e-3, 3e-3, 3e-3, 1e-3)])
    time = 1 / _gain(shared, "dbs", batch=512, epoch=100)
    yield Row(
        name="three workers share a GPU: dbs's time, of bsp's",
        paper="0.65",
        values=[time],
        goal="<= 0.7",
        how="simulated",
    )
    spells = parse_cluster((EXAMPLES / "dbs-episodes.toml").read_text())
    own, plain = (_run(spells, each, 128, 6000, 100).samples_per_second for each in ("dbs", "bsp"))
    yield Row(
        name="workers slowed for whole epochs: dbs's time, of bsp's",
        paper="below 1",
        values=[plain / own],
        goal="<= 0.8",
        how="simulated",
    )
    for what in ("updates", "accuracy"):
        yield records.row(f"dbs: {what}, difference from bsp over seed noise", "none", "<= 1", "updates_to_target.py")


def grouped(records):
    """Grouped parameter servers (HiPC 2018): 300 % delay within 20 % of the time without, at most 2.5 points lost."""
    for delay in (300, 400):
        yield records.row(f"at {delay} % delay, progressive, trained", "at most 1.2", "<= 1.2", "stragglers.py")
    yield records.row("digits: points lost to one group, progressive", "at most 2.5", "<= 2.5", "group_accuracy.py")


def dssp(records):
    """DSSP (ICDCS 2019), Table I: times to an accuracy over DSSP's."""
    for pair, paper, goal in (
        ("BSP/DSSP", "2.04", ">= 1.84"),
        ("SSP/DSSP", "1.85", ">= 1.67"),
        ("ASP/DSSP", "0.99", ">= 0.94"),
    ):
        for counted in ("fast worker's own samples", "global samples"):
            yield records.row(
                f"1 : 2.17, {counted}: {pair}, not bounded (paper {paper})", paper, goal, "dssp_table_one.py"
            )
    equal = "equal, global samples: BSP/DSSP, not bounded (paper 2.04)"
    yield records.row(equal, "much more than 1", ">= 1.1", "dssp_table_one.py")


CLAIMS = {
    "lb-bsp-two-times": lb_bsp_two_times,
    "lb-bsp-gpus": lb_bsp_gpus,
    "lb-bsp-cpus": lb_bsp_cpus,
    "narx": narx,
    "federated": federated,
    "dbs": dbs,
    "grouped": grouped,
    "dssp": dssp,
}


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--claim", choices=CLAIMS, action="append", help="one of them; repeatable (default: all)")
    parser.add_argument("--recorded", action="store_true", help="take measured figures from the records in results/")
    options = parser.parse_args()
    records = Records(options)
    names = options.claim or list(CLAIMS)
    rows = {name: list(CLAIMS[name](records)) for name in names}
    record.publish(
        "claims" if options.claim is None else f"claims-{'-'.join(names)}",
        "The papers' claims: a figure that misses its goal refutes one, in this setting",
        options,
        config={"claims": {name: CLAIMS[name].__doc__ for name in names}},
        figures=[
            record.figure(f"{name}: {row.name}", row.values, goal=row.goal) for name in names for row in rows[name]
        ],
        tables=[
            record.table(
                f"{name}: the papers' figures, and where ours come from",
                ("figure", "paper", "here", "how"),
                [(row.name, row.paper, f"{median(row.values):.3g}", row.how) for row in rows[name]],
            )
            for name in names
        ],
        raw={name: [vars(row) for row in rows[name]] for name in names},
    )
    return 0  # A claim that is refuted is a result.


class Records:
    """What the scripts beside this one have measured; each runs at most once."""

    def __init__(self, options):
        self._options = options
        self._known = {}

    def row(self, figure, paper, goal, script, *arguments, name=None):
        """A row of a figure as its script has it."""
        found = self.figure(figure, script, *arguments, name=name)
        return Row(name=figure, paper=paper, values=found["repetitions"], goal=goal, how=self.how(script, name))

    def figure(self, figure, script, *arguments, name=None):
        return next(each for each in self.of(script, *arguments, name=name)["figures"] if each["figure"] == figure)

    def of(self, script, *arguments, name=None):
        """The record of a script, which runs first unless only what is recorded was asked for."""
        name = name or Path(script).stem
        if name not in self._known:
            quick = ["--quick"] if self._options.quick else []
            if not self._options.recorded:
                record.console.print(f"  {' '.join([script, *arguments, *quick])}")
                done = subprocess.run([sys.executable, str(HERE / script), *arguments, *quick], check=False)
                if done.returncode not in (0, 1):
                    raise SystemExit(f"{script} failed: its own output above tells why")
            path = (record.RESULTS / "quick" if quick else record.RESULTS) / f"{name}.json"
            if not path.exists():
                raise SystemExit(f"{script} has no record in results/: leave out --recorded")
            self._known[name] = json.loads(path.read_text())
        return self._known[name]

    def how(self, script, name=None):
        """The script and the commit of its record."""
        return f"{script}, {(self._known[name or Path(script).stem]['environment']['git_commit'] or 'unknown')[:7]}"


def _narx_gain(takes, shortest, longest, seed):
    """The samples/s with narx over those with the default predictor, where others take what workers can see."""
    cluster = parse_cluster(SEEN.format(takes=takes, shortest=shortest, longest=longest, period=3 * longest, seed=seed))
    own, usual = (
        _run(cluster, each, 400, 2000, 2000).samples_per_second for each in ("lb-bsp:predictor=narx", "lb-bsp")
    )
    return own / usual


def _run(cluster, scheme, batch, iterations, epoch):
    return simulate(
        Scenario(
            cluster=cluster, scheme=parse_scheme(scheme), global_batch_size=batch, iterations=iterations,
            epoch_samples=epoch * batch,
        )
    )  # fmt: skip


def _gain(cluster, scheme, *, batch, epoch=2000):
    """The samples/s of a scheme over those of bsp, in 2,000 iterations."""
    own, plain = (_run(cluster, each, batch, 2000, epoch).samples_per_second for each in (scheme, "bsp"))
    return own / plain


def _allowed(cluster, batch):
    """The time of an iteration with equal sizes over the shortest that there is."""
    curves = [worker.device.curve for worker in cluster.workers]
    equal = max(curve.seconds(batch / len(curves)) for curve in curves)
    return equal / clusters.best(curves, batch)[0]


if __name__ == "__main__":
    sys.exit(main())
