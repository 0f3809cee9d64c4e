"""Local steps on unequal workers over a slow cable: time to a loss, final loss and bytes, beside torchft's DiLoCo.

Two network namespaces are the hosts, with a cable between them (token bucket filters) and two workers on each, which
take 1, 1, 2 and 4 times as long for a step. All train the same model on the same number of samples, with the same
inner optimizer, at tuned rates. The models of `large` have ten million parameters; the cable of `letters` is
as slow for its model. `turns` has equal workers, of which one is 4 times as slow in every other 10 s.
"""

import itertools
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from harness import record
from harness.hosts import run_workers, two_hosts

SCRIPT = Path(__file__).parent / "harness/local_steps_worker.py"
PERIOD, DELAY = 10, 8
MOMENTUM = 0.5
"""Of outer optimizers with momentum. The rates and it are those with the lowest final loss for seed 0, where the events
of a run were played in one process: of inner rates from 0.0005 to 0.015 and outer momenta of 0, 0.5 and 0.9."""
_OUTER = f"period={PERIOD},outer_momentum={MOMENTUM}"
LOCAL = {
    "torchft": "torchft",
    "diloco": f"diloco:{_OUTER}",
    "diloco, load=lb-bsp": f"diloco:{_OUTER},load=lb-bsp",
    "diloco, load=lb-bsp, delay": f"diloco:{_OUTER},load=lb-bsp,delay={DELAY},alpha=0.5",
    "diloco, steps=speed": f"diloco:{_OUTER},steps=speed",
    "diloco, steps=speed, int8": f"diloco:{_OUTER},steps=speed,wire=int8",
    "asp": f"asp:period={PERIOD}",
    "asp, int8": f"asp:period={PERIOD},wire=int8",
    "asp, steps=speed": f"asp:period={PERIOD},steps=speed",
    "asp, steps=speed, delayed": f"asp:{_OUTER},steps=speed,outer=delayed",
    "grouped, steps=speed": f"grouped:groups=hosts,period={PERIOD},steps=speed",
}
WHOLE = {"lb-bsp": "lb-bsp"}
"""Has the weights of `bsp` after each step, and sends as many bytes."""
TURNS = {name: LOCAL[name] for name in ("diloco", "asp")}
CASES = {"speeds 1:1:2:4": (WHOLE | LOCAL, "1:1:2:4"), "turns": (TURNS, "1:1:1:4/10")}
SOME = {name: LOCAL[name] for name in ("torchft", "diloco, steps=speed", "diloco, steps=speed, int8", "asp")}
LARGE = {"speeds 1:1:2:4": (WHOLE | SOME, "1:1:2:4")}
WORKERS = 4


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a task is trained: on `steps` batches of each worker at equal speeds, by AdamW."""

    steps: int
    batch: int
    rate: float
    seconds_per_sample: float
    megabits: int
    cases: dict


TASKS = {
    "large": Setting(steps=100, batch=2, rate=1e-3, seconds_per_sample=0.1, megabits=200, cases=LARGE),
    "letters": Setting(steps=300, batch=8, rate=6e-3, seconds_per_sample=0.003, megabits=17, cases=CASES),
}


def main():
    parser = record.arguments(__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--task", choices=TASKS, default="letters")
    options = parser.parse_args()
    setting = TASKS[options.task]
    seeds, steps = (1, 20) if options.quick else (options.seeds, setting.steps)
    raw = {case: {name: [] for name in schemes} for case, (schemes, _) in setting.cases.items()}
    for number, (case, (schemes, slowness)) in itertools.product(range(seeds), setting.cases.items()):
        for name in reversed(schemes) if number % 2 else schemes:
            found = _run(options.task, schemes[name], slowness, steps, options.seed + number)
            raw[case][name].append(found)
            record.console.print(
                f"  {number + 1}/{seeds} {case}, {name}: {found['seconds']:.1f} s, loss {found['curve'][-1][1]:.4f}"
            )
    done = record.publish(
        f"local_steps-{options.task}",
        f"Local steps on unequal workers over a slow cable: {options.task}",
        options,
        config=asdict(setting) | {"seeds": seeds, "steps": steps, "period": PERIOD, "outer_momentum": MOMENTUM},
        figures=list(_figures(raw)),
        raw=raw,
    )
    return 0 if done else 1


def _run(task, contestant, slowness, steps, seed):
    """What rank 0 tells of a run; `steps` is how many batches each worker has at equal speeds."""
    os.environ.update(RUST_LOG="error", TORCH_CPP_LOG_LEVEL="ERROR")
    setting = TASKS[task]
    with tempfile.TemporaryDirectory() as folder, two_hosts(setting.megabits) as hosts:
        options = {
            "out": folder, "seed": seed, "samples": steps * WORKERS * setting.batch, "batch": setting.batch,
            "period": PERIOD, "rate": setting.rate, "outer-momentum": MOMENTUM, "seconds": setting.seconds_per_sample,
            "slowness": slowness,
        }  # fmt: skip
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        run_workers(hosts, WORKERS, [str(SCRIPT), contestant, task, *words], 1200)
        return json.loads((Path(folder) / "0.json").read_text())


def _figures(raw):
    for case, found in raw.items():
        for name, runs in found.items():
            yield record.figure(f"{case}: {name}, the run", [each["seconds"] for each in runs], unit="s")
            yield record.figure(f"{case}: {name}, final loss", [_loss(each) for each in runs])
    speeds = raw["speeds 1:1:2:4"]
    judged = ("diloco, steps=speed", "asp")
    others = [name for name in speeds if name not in (*WHOLE, "torchft", *judged)]
    for base, goal, names in (("torchft", "<= 0.5", judged), ("lb-bsp", "<= 0.2", judged), ("torchft", None, others)):
        for name in names:
            times = [_seconds_to_the_same(*pair) for pair in zip(speeds[name], speeds[base], strict=True)]
            yield record.figure(f"{name}: time to a loss, of {base}'s", times, goal=goal)
    for name in ("torchft", *judged, *others):
        pairs = list(zip(speeds[name], speeds["lb-bsp"], strict=True))
        yield record.figure(f"{name}: final loss, of bsp's", [_loss(a) / _loss(b) for a, b in pairs], goal="<= 1.01")
        yield record.figure(
            f"{name}: bytes sent, of bsp's / H", [PERIOD * a["sent"] / b["sent"] for a, b in pairs],
            goal="<= 0.275" if name.endswith("int8") else "<= 1.1",
        )  # fmt: skip
    if "turns" in raw:
        times = [_seconds_to_the_same(*pair) for pair in zip(raw["turns"]["asp"], raw["turns"]["diloco"], strict=True)]
        yield record.figure("turns: asp's time to a loss, of diloco's", times, goal="<= 1")


def _loss(run):
    return run["curve"][-1][1]


def _seconds_to_the_same(one, other):
    """How many times as long `one` takes as `other` to the loss that both have reached: the worse of the two best."""
    target = max(min(loss for _, loss in run["curve"]) for run in (one, other))
    first, second = (next(at for at, loss in run["curve"] if loss <= target) for run in (one, other))
    return first / second


if __name__ == "__main__":
    sys.exit(main())
