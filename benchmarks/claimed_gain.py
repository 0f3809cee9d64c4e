"""What a run claims to have gained over equal sizes, beside what a clock around both says.

The model of examples/char_lm.py, whose iterations have a large fixed part, is trained under `bsp` and under `lb-bsp` by
turns of one epoch each in the same processes, so that whatever else the machine does slows both alike. One worker is
three times slower on purpose (`emulated`), has another process on its core (`hog`) or a quota of half a core (`quota`);
under the last two every worker is pinned to a core and nothing is emulated.
"""

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from harness import record
from harness.competitors import competitor, pin, why_no_quota
from harness.workers import run_workers
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep.cluster import parse_cluster
from evenstep.report.overview import overview_of, values_of
from evenstep.report.recorded import read_run

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from char_lm import CHARACTERS, Writer, bits

VICTIM, SAMPLES, CONTEXT, WIDTH = 1, 16, 64, 256
WORKERS = {"emulated": 3, "hog": 2, "quota": 2}
SCHEMES = ("bsp", "lb-bsp")
RESAMPLES = 1000
SLOW = '[disturbances.slow]\nkind = "constant"\nfactor = 3\n[[workers]]\n[[workers]]\ndisturb = ["slow"]\n[[workers]]\n'


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--iterations", type=int, default=15, help="of an epoch")
    parser.add_argument("--case", choices=WORKERS, default="emulated")
    options = parser.parse_args()
    if options.quick:
        options.repetitions, options.epochs, options.iterations = 1, 3, 12
    case, skipped = options.case, why_no_quota()
    if case == "quota" and skipped is not None:
        parser.error(skipped)
    runs = []
    for repetition in range(options.repetitions):
        with tempfile.TemporaryDirectory() as folder:
            plan = (case, folder, options.epochs, options.iterations, options.seed + repetition)
            seconds = run_workers(WORKERS[case], _train_by_turns, plan)
            runs.append({scheme: _said(Path(folder, scheme)) for scheme in SCHEMES} | {"seconds": seconds})
        record.console.print(f"  {_measured(runs[-1])[0]:.2f} times, {runs[-1]['lb-bsp']['verdict']}", soft_wrap=True)
    done = record.publish(
        f"claimed_gain-{case}",
        f"What a run claims to have gained over equal sizes, and what it gained: {case}",
        options,
        config={
            "workers": WORKERS[case],
            "samples_per_worker": SAMPLES,
            "context": CONTEXT,
            "width": WIDTH,
            "epochs": options.epochs,
            "epoch_iterations": options.iterations,
        },
        figures=_figures(runs),
        raw=runs,
    )
    return 0 if done else 1


def _train_by_turns(rank, plan, _tell):
    """The seconds of every epoch, by scheme."""
    case, folder, epochs, iterations, seed = plan
    with ExitStack() as stack:
        if case != "emulated":
            pin(rank)
            stack.enter_context(competitor(case if rank == VICTIM else None, core=rank)).turn(on=True)
        prepared = {scheme: _prepare(case, scheme, f"{folder}/{scheme}", iterations, seed) for scheme in SCHEMES}
        seconds = {scheme: [] for scheme in SCHEMES}
        for number in range(epochs):
            for scheme in SCHEMES if number % 2 else reversed(SCHEMES):
                seconds[scheme].append(_epoch(*prepared[scheme]))
        for _, _, loader in prepared.values():
            loader.close()
    return seconds


def _prepare(case, scheme, run_dir, iterations, seed):
    torch.manual_seed(seed)
    model = Writer(WIDTH, 1)
    text = torch.randint(CHARACTERS, (iterations * SAMPLES * WORKERS[case], CONTEXT + 1))
    return evenstep.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=5e-3),
        DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=SAMPLES, shuffle=True),
        scheme=scheme,
        seed=seed,
        emulate=parse_cluster(SLOW) if case == "emulated" else None,
        run_dir=run_dir,
    )


def _epoch(model, optimizer, loader):
    dist.barrier()
    began = time.perf_counter()
    for batch in loader:
        loss = bits(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.barrier()
    return time.perf_counter() - began


def _said(run_dir):
    """What the run says of itself."""
    values = values_of(overview_of(run_dir.name, read_run(run_dir)))
    told = {name: values[name] for name in ("samples_per_second", "equal_samples_per_second")}
    verdict, gained = values["verdict"], values["over_equal_sizes"]
    return told | {
        "speed_up_over_equal": None if gained is None else gained["estimate"],
        "interval": None if gained is None else [gained["low"], gained["high"]],
        "slowdown": verdict["slowdown"],
        "slow_worker": verdict["worker"],
        "verdict": verdict["text"],
    }


def _measured(one):
    """How many times as long equal sizes took, and the ends of its 95 % interval over the epochs, which are in pairs.

    A run's claim is of all its iterations, too.
    """
    equal, balanced = (np.array(one["seconds"][scheme]) for scheme in SCHEMES)
    drawn = np.random.default_rng(0).integers(len(equal), size=(RESAMPLES, len(equal)))
    low, high = np.percentile(equal[drawn].sum(axis=1) / balanced[drawn].sum(axis=1), (2.5, 97.5))
    return float(equal.sum() / balanced.sum()), float(low), float(high)


def _figures(runs):
    measured = [_measured(one) for one in runs]
    said = [one["lb-bsp"] for one in runs]
    # A run that is too short to tell claims nothing.
    claims = [(each, truth) for each, truth in zip(said, measured, strict=True) if each["interval"] is not None]
    values = {
        "times as fast as bsp, measured": [ratio for ratio, _, _ in measured],
        "lower end of its interval": [low for _, low, _ in measured],
        "upper end of its interval": [high for _, _, high in measured],
        "times as fast as equal sizes, claimed": [claim["speed_up_over_equal"] for claim, _ in claims],
        "lower end of the claimed interval": [claim["interval"][0] for claim, _ in claims],
        "upper end of the claimed interval": [claim["interval"][1] for claim, _ in claims],
        "claim over what was measured": [claim["speed_up_over_equal"] / ratio for claim, (ratio, _, _) in claims],
        "times slower that the slow worker is said to be": [each["slowdown"] for each in said if each["slowdown"]],
    }
    figures = [record.figure(name, each) for name, each in values.items() if each]
    held = [claim["interval"][0] <= ratio <= claim["interval"][1] for claim, (ratio, _, _) in claims]
    met = [claim["interval"][0] <= high and low <= claim["interval"][1] for claim, (_, low, high) in claims]
    figures.append(record.figure("claims whose interval meets the measured one, of all", [_share(met)], goal=">= 1"))
    return [*figures, record.figure("claims whose interval holds what was measured, of all", [_share(held)])]


def _share(held):
    return sum(held) / max(len(held), 1)


if __name__ == "__main__":
    sys.exit(main())
