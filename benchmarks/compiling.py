"""Time of training that compiles, from the first batch to the last: bsp and lb-bsp, one of two workers 3 times slower.

A model that is compiled before `prepare` has one graph for all sizes, one that is compiled after it has two, and JAX
compiles for every new size. Each run starts with empty caches of its compiler.
"""

import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from harness import record

from evenstep.telemetry import read_events
from evenstep.telemetry.events import IterationDone

ROOT = Path(__file__).parents[1]
SLOWED, WORKERS = "1=3x", 2
KINDS = {
    "jax": "JAX, jit",
    "torch-before": "torch.compile before prepare",
    "torch-after": "torch.compile after prepare",
}
SCHEMES = ("bsp", "lb-bsp")


def main():
    parser = record.arguments(__doc__.partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--lengths", type=int, nargs="+", default=[160], help="iterations")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--jax", default=str(ROOT / ".venv-jax/bin/python"), metavar="PATH", help="interpreter for JAX")
    options = parser.parse_args()
    # Where interpreters lie says nothing to the readers of the record.
    sys.argv = [word for before, word in pairwise(["", *sys.argv]) if "--jax" not in (before, word)]
    lengths = [12] if options.quick else options.lengths
    repetitions = 1 if options.quick else options.repetitions
    cases = [(kind, length) for kind in options.kinds for length in lengths]
    raw = {(*case, scheme): [] for case in cases for scheme in SCHEMES}
    for _ in range(repetitions):
        for key in raw:
            raw[key].append(trained(*key, options.jax if key[0] == "jax" else None))
            record.console.print(f"  {', '.join(map(str, key))}: {raw[key][-1]['seconds']:.2f} s")
    figures = []
    for kind, length in cases:
        times = {scheme: [each["seconds"] for each in raw[kind, length, scheme]] for scheme in SCHEMES}
        gains = [equal / ours for equal, ours in zip(times["bsp"], times["lb-bsp"], strict=True)]
        figures.append(record.figure(f"{KINDS[kind]}, {length} iterations: times bsp", gains, goal=">= 1"))
    done = record.publish(
        "compiling",
        "Training time with compilation, two workers, one of them 3 times slower",
        options,
        config={"workers": WORKERS, "slow": SLOWED, "lengths": lengths, "repetitions": repetitions},
        figures=figures,
        raw={", ".join(map(str, key)): each for key, each in raw.items()},
    )
    return 0 if done else 1


def trained(kind, length, scheme, python):
    """Seconds of the iterations of worker 0, of which the first one compiles, and how many sizes it had."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "run")
        command = [sys.executable, "-m", "evenstep", "run", "--workers", str(WORKERS), "--slow", SLOWED]
        command += ["--scheme", scheme, "--run-dir", str(run_dir)]
        command += ["--framework", "jax", "--no-python", python] if python else []
        worker = ROOT / "benchmarks/harness/compiled_worker.py"
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(Path(folder, "cache"))}
        subprocess.run([*command, str(worker), kind, str(length)], check=True, env=environment)
        done = [each for each in read_events(run_dir, kind=IterationDone) if each.worker == 0]
    return {
        "seconds": sum(each.iteration_seconds for each in done),
        "first_seconds": done[0].iteration_seconds,
        "sizes": len({each.samples for each in done}),
    }


if __name__ == "__main__":
    sys.exit(main())
