"""From the command line to the first iteration of two workers: `evenstep run` beside torchrun, on the same tiny script.

The commands take turns, in the opposite order every other time. What is told apart is the launcher's part, and that of
`prepare` and its imports in the workers. All may write and read compiled modules, as an installed package has them.
CPU time is that of worker 0 and of the processes that started it, until the end of its first iteration; it depends less
on what else the machine does. `--imports` prints instead which imports take longest in a worker.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import record

SCRIPT = Path(__file__).parent / "harness" / "first_iteration.py"
WORKERS = 2
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS))
_OURS = (sys.executable, "-m", "evenstep", "run", "--workers", str(WORKERS))
COMMANDS = {
    "torchrun, plain DDP": (*_TORCHRUN, str(SCRIPT), "ddp"),
    "torchrun, evenstep": (*_TORCHRUN, str(SCRIPT), "evenstep"),
    "evenstep run, plain DDP": (*_OURS, str(SCRIPT), "ddp"),
    "evenstep run, evenstep": (*_OURS, str(SCRIPT), "evenstep"),
}
PLAIN, OURS = "torchrun, plain DDP", "evenstep run, evenstep"
LIMIT_SECONDS = 0.5
_PATIENCE_SECONDS = 300
_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
_IMPORTS = "import torch, evenstep.torch.prepare, evenstep.torch.running"
_SHOWN = 25


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument(
        "--imports", action="store_true", help="print what a worker's imports take, and measure nothing"
    )
    options = parser.parse_args()
    if options.imports:
        return _print_imports()
    if options.quick:
        options.repetitions = 1
    else:
        _seconds(COMMANDS[OURS])  # It compiles the modules and brings all files into the system's cache.
    raw, busy = {name: [] for name in COMMANDS}, os.getloadavg()
    for number in range(options.repetitions):
        names = list(COMMANDS)
        for name in reversed(names) if number % 2 else names:
            raw[name].append(_seconds(COMMANDS[name]))
        record.console.print(f"  {number + 1}: {', '.join(f'{raw[name][-1][0]:.2f} s {name}' for name in names)}")
    seconds, cpu = ({name: [each[part] for each in raw[name]] for name in COMMANDS} for part in (0, 1))
    done = record.publish(
        "startup",
        f"From the command line to the first iteration, {WORKERS} workers",
        options,
        config={"workers": WORKERS, "repetitions": options.repetitions, "load_average": [busy, os.getloadavg()]},
        figures=[
            *(record.figure(name, seconds[name], unit="s") for name in COMMANDS),
            record.figure(f"{OURS}, beyond {PLAIN}", _beyond(seconds), goal=f"<= {LIMIT_SECONDS:g}", unit="s"),
            *(record.figure(f"CPU time, {name}", cpu[name], unit="s") for name in COMMANDS),
            record.figure(f"CPU time, {OURS}, beyond {PLAIN}", _beyond(cpu), unit="s"),
        ],
        raw=raw,
    )
    return 0 if done else 1


def _beyond(seconds):
    return [ours - plain for ours, plain in zip(seconds[OURS], seconds[PLAIN], strict=True)]


def _seconds(command):
    """From the start of the command to the end of worker 0's first iteration: by the clock, and CPU on the way."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "done"
        began = time.time()
        command = (*command, str(os.getpid()), str(out))
        subprocess.run(command, check=True, capture_output=True, timeout=_PATIENCE_SECONDS, env=_ENVIRONMENT)
        at, cpu = json.loads(out.read_text(encoding="utf-8"))
        return at - began, cpu


def _print_imports():
    command = (sys.executable, "-X", "importtime", "-c", _IMPORTS)
    said = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=_PATIENCE_SECONDS, env=_ENVIRONMENT
    ).stderr
    rows = [
        line.removeprefix("import time:").split("|") for line in said.splitlines() if line.startswith("import time:")
    ]
    taken = sorted(((int(own), name.strip()) for own, _, name in rows[1:]), reverse=True)
    ours = sum(own for own, name in taken if name.partition(".")[0] == "evenstep")
    record.console.print(
        f"{len(taken)} modules, {sum(own for own, _ in taken) / 1e6:.2f} s; evenstep's {ours / 1e6:.2f} s"
    )
    for own, name in taken[:_SHOWN]:
        record.console.print(f"  {own / 1000:7.1f} ms  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
