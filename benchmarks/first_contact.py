"""What a newcomer sees: each command as its page gives it, typed in a fresh folder, and the gain that its run states.

A script `train.py` is the first block of Python on the page. What is judged is what is printed. Where a run tells only
the ends of a wide interval, the lower end counts as its gain; where it tells no gain, 0 does. Where the page has that
command with `--scheme bsp` too, the gain is the quotient of what both say that they trained in a second.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import interpreters, record

ROOT = Path(__file__).parents[1]
TWO = "evenstep run --workers 2 --slow 1=4x"
OWN = "evenstep run --framework {} --workers 2 --slow 1=4x train.py"
CASES = {
    "demo": ("README.md", "evenstep demo"),
    "readme": ("README.md", f"{TWO} train.py"),
    "ddp_evenstep": ("examples/README.md", f"{TWO} examples/ddp_evenstep.py"),
    "cluster": (
        "examples/README.md",
        "evenstep run --workers 4 --emulate examples/cluster.toml examples/ddp_evenstep.py",
    ),
    "char_lm": ("examples/README.md", f"{TWO} examples/char_lm.py"),
    "resume": ("examples/README.md", f"{TWO} examples/resume.py --checkpoints slow"),
    "images": ("examples/README.md", f"{TWO} examples/images.py"),
    "gpt": ("examples/README.md", f"{TWO} examples/gpt.py"),
    "fsdp": ("docs/fsdp.md", f"{TWO} examples/fsdp.py"),
    "lengths": ("docs/cost.md", f"{TWO} examples/lengths.py"),
    "own_batches": ("docs/sessions.md", f"{TWO} examples/own_batches.py"),
    "numpy_balancer": ("docs/any-framework.md", "python examples/numpy_balancer.py"),
    "expert": ("docs/custom-policies.md", f"{TWO} --scheme custom_policy:periodic:period=20 custom_policy.py"),
    "load": ("docs/custom-policies.md", f"{TWO} --scheme custom_policy:by_last_time:keep=0.8 custom_policy.py"),
    "accelerate": ("docs/integrations/accelerate.md", f"{TWO} train.py"),
    "lightning": ("docs/integrations/lightning.md", f"{TWO} train.py"),
    "ray": ("docs/integrations/ray.md", "EVENSTEP_SLOW=1=4x python train.py"),
    "transformers": ("docs/integrations/transformers.md", f"{TWO} train.py"),
    "jax": ("docs/frameworks/jax.md", OWN.format("jax")),
    "mxnet": (
        "docs/frameworks/mxnet.md",
        OWN.format("mxnet").replace("train", "--no-python /path/to/mxnet/python train"),
    ),
    "tensorflow": ("docs/frameworks/tensorflow.md", OWN.format("tensorflow")),
}
"""The page of each command, and the command."""
NUMBER = r"(\d+\.\d+)"
BSP = {
    "jax": f"{OWN.format('jax').removesuffix(' train.py')} --scheme bsp train.py",
    "tensorflow": f"{OWN.format('tensorflow').removesuffix(' train.py')} --scheme bsp train.py",
    "load": f"{TWO} --scheme bsp custom_policy.py",
}
"""What is compared with the command of that name."""
RATE = re.compile(r"trained ([\d,.]+) samples/s")
GAIN = re.compile(rf"(?:Training is|lb-bsp trained) {NUMBER} times as fast as \S+ ?(?:equal sizes)?")
INTERVAL = re.compile(rf"95% interval {NUMBER} to {NUMBER}")
ENDS = re.compile(rf"Training is {NUMBER} to {NUMBER} times as fast")
SIZES = re.compile(r"batch sizes ([\d ]+) at first, ([\d ]+) at the end")
PATIENCE_SECONDS = 600


def main():
    parser = record.arguments(__doc__.partition("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repetitions", type=int, default=3)
    interpreters.add_argument(parser)
    options = parser.parse_args()
    pythons = interpreters.named(options, ("jax", "mxnet", "tensorflow"))
    for name in options.cases:
        page, command = CASES[name]
        for each in filter(None, (command, BSP.get(name))):
            if each not in (ROOT / page).read_text(encoding="utf-8"):
                parser.error(f"{page} has no command {each!r}")
    repetitions = 1 if options.quick else options.repetitions
    raw = {name: [] for name in options.cases}
    for _ in range(repetitions):
        for name in raw:
            raw[name].append(said(typed(*CASES[name], pythons.get(name))))
            if name in BSP:
                equal = said(typed(CASES[name][0], BSP[name], pythons.get(name)))
                raw[name][-1] |= {"gain": raw[name][-1]["rate"] / equal["rate"], "equal": equal}
            record.console.print(f"  {name}: {raw[name][-1]}", markup=False)
    figures = []
    for name, runs in raw.items():
        figures.append(record.figure(f"{name}: times equal sizes", [run["gain"] for run in runs], goal=">= 1.5"))
        if name != "demo" and name not in BSP:  # They compare runs, and have no interval.
            lows = [run["interval"][0] for run in runs]
            figures.append(record.figure(f"{name}: lower end of the interval", lows, goal=">= 1.01"))
        figures.append(record.figure(f"{name}: time", [run["seconds"] for run in runs], unit="s", goal="<= 75"))
    done = record.publish(
        "first_contact",
        "What each command on README.md and the pages of examples says it gained",
        options,
        config={"commands": {name: list(CASES[name]) for name in raw}, "repetitions": repetitions},
        figures=figures,
        raw=raw,
    )
    return 0 if done else 1


def typed(page, command, python=None):
    """What the command prints, and its seconds; RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "examples", Path(folder, "examples"))
        script = re.search(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
        if "train.py" in command:
            Path(folder, "train.py").write_text(script[1], encoding="utf-8")
        if python is not None:
            command = re.sub(r"(--no-python \S+ )?train.py", f"--no-python {python} train.py", command)
        where = Path(folder, "examples") if " custom_policy" in command else folder
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        began = time.monotonic()
        ended = subprocess.run(
            command,
            shell=True,
            cwd=where,
            env={**os.environ, "PATH": path, "PYTHONIOENCODING": "utf-8"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            timeout=PATIENCE_SECONDS,
        )
    if ended.returncode:
        raise RuntimeError(f"{command} ended with {ended.returncode}:\n{ended.stdout}")
    return ended.stdout, time.monotonic() - began


def said(printed):
    """The gain that a run states, its interval, and the sizes before and after."""
    text, seconds = " ".join(printed[0].split()), printed[1]
    ends = ENDS.search(text)
    gain, interval, sizes = GAIN.search(text), ends or INTERVAL.search(text), SIZES.search(text)
    rate = RATE.search(text)
    low, high = map(float, interval.groups()) if interval else (0.0, 0.0)
    return {
        "gain": low if ends else float(gain[1]) if gain else 0.0,
        "interval": [low, high],
        "rate": float(rate[1].replace(",", "")) if rate else 0.0,
        "sizes": [[int(size) for size in each.split()] for each in sizes.groups()] if sizes else None,
        "seconds": seconds,
        "said": re.findall(r"evenstep: (?!.*average|.*[█░]).*", printed[0]),
    }


if __name__ == "__main__":
    sys.exit(main())
