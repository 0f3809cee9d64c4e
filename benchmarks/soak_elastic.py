"""A soak of an elastic run: four replicas, of which one is killed every 5 s, for 10 minutes.

Afterwards each slice must have counted once, the weights must be those of one process, and nothing may be left.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil
import torch

REPLICAS, SAMPLES, GLOBAL_BATCH, FEATURES = 4, 480, 24, 6


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        train(options.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        wrong = soak(Path(folder), options)
    print(*(f"WRONG: {each}" for each in wrong), sep="\n")
    sys.exit(bool(wrong))


def parts():
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    torch.manual_seed(1)
    layers = torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    return layers, torch.optim.SGD(layers.parameters(), lr=0.01, momentum=0.9), dataset


def train(folder):
    """What a replica runs: epochs until the file `stop` is there."""
    import evenstep

    torch.set_num_threads(1)
    name = f"{os.environ['RANK']}-{os.environ['EVENSTEP_RESTART']}"
    layers, optimizer, dataset = parts()
    loader = torch.utils.data.DataLoader(dataset, batch_size=GLOBAL_BATCH // REPLICAS, shuffle=True)
    model, optimizer, loader = evenstep.prepare(layers, optimizer, loader, global_batch_size=GLOBAL_BATCH)
    (folder / f"pid-{name.partition('-')[0]}").write_text(str(os.getpid()))
    with (folder / f"steps-{name}").open("a", buffering=1) as journal:
        while not (folder / "stop").exists():
            for inputs, targets in loader:
                step = loader.session.step
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                share = loader.current
                if loader.session.counted:
                    positions = list(share.positions[: share.samples])
                    journal.write(json.dumps([step, loader.batch_sizes, positions, time.time()]) + "\n")
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    (folder / f"finished-{name}").write_text(json.dumps([loader.session.step, weights.tolist()]))


def soak(folder, options):
    chance, ends = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    command = [sys.executable, "-m", "evenstep", "run", "--elastic", f"1:{REPLICAS}", "--max-restarts", "1000"]
    command += [__file__, "--folder", str(folder)]
    kills, memory = [], []
    with (folder / "terminal").open("w") as terminal:
        launcher = subprocess.Popen(command, stderr=terminal, stdout=terminal, stdin=subprocess.DEVNULL)
        while time.monotonic() < ends and launcher.poll() is None:
            time.sleep(options.every)
            there = sorted(folder.glob("pid-*"))
            memory.append(psutil.Process(launcher.pid).memory_info().rss >> 20)
            if len(there) > 1:  # Of each process only once; the last one is left.
                victim = chance.choice(there)
                pid = int(victim.read_text())
                victim.unlink()
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    kills.append(time.time())
        (folder / "stop").touch()
        with suppress(subprocess.TimeoutExpired):
            launcher.wait(120)
        code, left = launcher.poll(), len(psutil.Process().children(recursive=True))
        launcher.kill()
    return report(folder, kills, memory, code, left)


def report(folder, kills, memory, code, left):
    """Print what came of it, and return what is wrong."""
    steps, finished = {}, [json.loads(each.read_text()) for each in folder.glob("finished-*")]
    wrong = [] if code == 0 else [f"the launcher ended with {code}", (folder / "terminal").read_text()[-2000:]]
    wrong += [f"{left} processes are left"] if left else []
    for file in folder.glob("steps-*"):
        for line in file.read_text().splitlines():
            step, sizes, positions, at = json.loads(line)
            steps.setdefault(step, []).append((sizes, positions, at))
    if sorted(steps) != list(range(len(steps))):
        wrong.append("steps are missing")
    per_epoch = SAMPLES // GLOBAL_BATCH
    for step, lines in steps.items():
        done = sorted(position for _, positions, _ in lines for position in positions)
        whole = list(range(step % per_epoch * GLOBAL_BATCH, (step % per_epoch + 1) * GLOBAL_BATCH))
        # A process that is killed has not always written down the step that it took part in.
        if (
            not set(done) <= set(whole)
            or len(set(done)) < len(done)
            or (len(lines) == len(lines[0][0]) and done != whole)
        ):
            wrong.append(f"step {step} is not its slice: {lines}")
    for number, weights in finished:
        distance = float((torch.tensor(weights, dtype=torch.float64) - alone(number)).abs().max())
        wrong += [] if distance < 1e-10 else [f"weights after {number} steps are {distance} from one process"]
    times = sorted(min(at for *_, at in lines) for lines in steps.values())
    gaps = [min((at for at in times if at > kill), default=kill) - kill for kill in kills]
    deaths = len(list(folder.glob("steps-*"))) - len(finished)
    print(f"{len(steps)} steps, {len(kills)} kills, {deaths} processes that ended early, {len(finished)} that finished")
    if gaps:
        print(f"from a kill to the next step: median {median(gaps):.2f} s, longest {max(gaps):.2f} s")
        print(f"the longest time between two steps: {max(b - a for a, b in pairwise(times)):.2f} s")
        print(f"memory of the launcher: {memory[0]} MB at first, {memory[-1]} MB at last")
    return wrong


def alone(steps):
    """The weights of one process after so many steps."""
    layers, optimizer, dataset = parts()
    for step in range(steps):
        epoch, at = divmod(step, SAMPLES // GLOBAL_BATCH)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        inputs, targets = dataset[order[at * GLOBAL_BATCH : (at + 1) * GLOBAL_BATCH]]
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(layers(inputs), targets).backward()
        optimizer.step()
    return torch.cat([each.detach().flatten() for each in layers.parameters()])


if __name__ == "__main__":
    main()
