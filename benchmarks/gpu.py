"""Everything that only a CUDA device can show, on one device, without a network; `--device cpu` for what a CPU can."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
from harness import gpu_parity, gpu_timing, gpu_unequal, record
from harness.workers import WorkerFailedError, run_workers

PARTS = ("parity", "stopwatch", "waits", "overhead", "memory", "unequal")
ONLY_CUDA = ("stopwatch", "waits", "memory")
"""Those that measure what a CPU does not have: a stream of its own, and an allocator with a limit."""
WITHIN = 0.03
"""How far the stopwatch may be from the trace."""


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--part", choices=PARTS, nargs="*", default=PARTS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here: --device cpu runs what needs none")
    options.quick = options.quick or options.device == "cpu"
    done = [globals()[f"_{part}"](options) for part in options.part if _applies(part, options)]
    return 0 if all(done) else 1


def _applies(part, options):
    if options.device == "cuda" or part not in ONLY_CUDA:
        return True
    record.console.print(f"{part}: needs a CUDA device, so it is left out here")
    return False


def _parity(options):
    raw, figures = {}, []
    for check in gpu_parity.CHECKS:
        try:
            raw[check.name] = run_workers(check.workers, gpu_parity.difference, (check, options.device))
            value = raw[check.name]["difference"]
        except WorkerFailedError as error:
            raw[check.name], value = str(error), float("inf")
            record.console.print(f"{check.name}: {error}")
        figures.append(record.figure(check.name, [value], goal=f"<= {check.tolerance:g}"))
    return _publish("parity", "The largest difference of a weight from one process's", options, figures, raw)


def _stopwatch(options):
    raw = run_workers(1, gpu_timing.stopwatch, _plan(options))
    ratio = median(raw["stopwatch"]) / median(raw["trace"])
    figures = [
        record.figure("compute by the stopwatch, times the trace's, less 1", [abs(ratio - 1)], goal=f"<= {WITHIN}")
    ]
    return _publish("stopwatch", "Compute seconds by events in the stream, against a trace", options, figures, raw)


def _waits(options):
    raw = run_workers(1, gpu_timing.waits, {**_plan(options), "variants": ("ddp", "lb-bsp")})
    figures = []
    for net, by_variant in raw.items():
        for kind in gpu_timing.WAITS:
            more = by_variant["lb-bsp"][kind] - by_variant["ddp"][kind]
            # One event is waited for in each iteration: that of the iteration before, long over.
            goal = "<= 1" if kind == "cudaEventSynchronize" else "<= 0"
            figures.append(record.figure(f"{net}: {kind} an iteration, beyond plain DDP's", [more], goal=goal))
    return _publish("waits", "Calls in which the host waits for the device", options, figures, raw)


def _overhead(options):
    plan = {**_plan(options), "variants": ("ddp", "bsp", "lb-bsp")}
    plan.update(
        {"warmup": 2, "rounds": 2, "iterations": 2} if options.quick else {"warmup": 20, "rounds": 12, "iterations": 10}
    )
    raw, figures = {}, []
    for workers in (1, 2):
        raw[str(workers)] = run_workers(workers, gpu_timing.blocks, plan, record.console.print)
        for net, seconds in raw[str(workers)].items():
            for variant in ("bsp", "lb-bsp"):
                ratios = [ours / ddp for ours, ddp in zip(seconds[variant], seconds["ddp"], strict=True)]
                goal = None if options.quick else "<= 1.01"
                figures.append(record.figure(f"{net}, {workers} ranks: {variant}, times DDP", ratios, goal=goal))
    return _publish("overhead", "Wall time of an iteration, times plain DDP's", options, figures, raw)


def _memory(options):
    """Two starts into one run directory: the first does not fit and says so, the second knows."""
    script = Path(gpu_unequal.__file__).with_name("gpu_memory.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(script.parents[1]), *filter(None, sys.path)])}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "evenstep.cli.main", "run", "-n", "2", "--run-dir", folder, str(script)]
        starts = [
            subprocess.run(command, env=environment, capture_output=True, text=True, check=False) for _ in range(2)
        ]
    raw = [{"code": each.returncode, "out": each.stdout[-4000:], "err": each.stderr[-4000:]} for each in starts]
    named = "ran out of memory with a batch of" in starts[0].stderr
    told = [json.loads(line) for line in starts[1].stdout.splitlines() if line.startswith("{")]
    share = told[0]["largest_run"] / told[0]["holds"] if told else float("nan")
    figures = [
        record.figure(
            "first start: an error that names the worker, the batch and what to do", [int(named)], goal=">= 1"
        ),
        record.figure("second start: exit status", [starts[1].returncode], goal="<= 0"),
        record.figure("second start: worker 0's largest batch, of what its memory holds", [share], goal="<= 1"),
    ]
    return _publish("memory", "A worker with a fourth of the other's memory", options, figures, raw)


def _unequal(options):
    cuda = options.device == "cuda"
    plan = {**_plan(options), "width": 4096 if cuda else 512, "batch": 4096 if cuda else 256}
    plan.update({"settling": 40, "iterations": 40} if cuda else {"settling": 10, "iterations": 10})
    with gpu_unequal.shares_of_the_device() if cuda else gpu_unequal.nullcontext(False) as shares:
        found = run_workers(3 if shares else 2, gpu_unequal.against_equal_sizes, {**plan, "shares": shares})
    figures = [
        record.figure(f"samples/s of lb-bsp, times equal sizes' (slowed by {found['by']})", [gpu_unequal.gain(found)])
    ]
    return _publish("unequal", "Unequal workers on one device", options, figures, found)


def _plan(options):
    return {"device": options.device, "quick": options.quick}


def _publish(part, title, options, figures, raw):
    name = torch.cuda.get_device_name() if options.device == "cuda" else "no CUDA device"
    return record.publish(f"gpu-{part}", title, options, config={"device": name}, figures=figures, raw=raw)


if __name__ == "__main__":
    sys.exit(main())
