"""Updates to a training loss: sizes in step with speed must not change what training learns, only how long it takes.

Handwritten digits on four workers of speeds 1:1:2:4, under each scheme from the same seeds. With weights by samples all
schemes train on the same union batches, so they should need as many updates as equal sizes; DBS with gradients averaged
without weights, as in its paper's first code, is shown beside them.
"""

import sys
from statistics import mean, stdev

import torch
import torch.distributed as dist
from harness import clusters, record
from harness.workers import run_workers
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep.cli.demonstration.setting import read_digits
from evenstep.cli.demonstration.train import network
from evenstep.core.errors import ConfigError
from evenstep.core.load.equal import EqualPolicy
from evenstep.schemes import parse_scheme

SPEEDS, BATCH, SECONDS = (1, 1, 2, 4), 104, 0.02
"""Emulated times so short that they are not met exactly everywhere: here only updates count, not seconds."""
SEEDS, EPOCHS, EVERY = 5, 8, 2
TARGET = 0.1
LEARNING_RATE, MOMENTUM = 0.05, 0.9
BASELINE, SCHEMES = "bsp", ("lb-bsp", "dbs", "dbs:weighting=mean")
SAME = ("lb-bsp", "dbs")
"""Those that should equal the baseline, within the noise of seeds."""


def main():
    options = record.arguments(__doc__).parse_args()
    seeds, epochs = (2, 3) if options.quick else (SEEDS, EPOCHS)
    schemes = [BASELINE, *_known(SCHEMES)]
    target = 0.5 if options.quick else TARGET
    work = {
        "schemes": schemes,
        "seeds": [options.seed + number for number in range(seeds)],
        "epochs": epochs,
    }
    raw = run_workers(len(SPEEDS), _train_all, work, record.console.print)
    for of_scheme in raw.values():
        for run in of_scheme:
            run["updates_to_target"] = _updates(run, target)
    done = record.publish(
        "updates_to_target",
        f"Updates to a training loss of {target:g}: digits, {len(SPEEDS)} workers of speeds"
        f" {':'.join(map(str, SPEEDS))}, {seeds} seeds",
        options,
        config={
            "speeds": SPEEDS,
            "global_batch_size": BATCH,
            "ideal_seconds": SECONDS,
            "epochs": epochs,
            "evaluated_every": EVERY,
            "target_loss": target,
            "optimizer": {"name": "SGD", "lr": LEARNING_RATE, "momentum": MOMENTUM},
            "seeds": work["seeds"],
        },
        figures=_figures(raw),
        tables=[_table(raw)],
        raw=raw,
    )
    return 0 if done else 1


def _known(names):
    """Those that this version can make; says why it leaves others out."""
    known = []
    for name in names:
        try:
            policy = parse_scheme(name).load.policy(len(SPEEDS))
        except ConfigError as error:
            record.console.print(f"  left out: {name}: {error}")
            continue
        if isinstance(policy, EqualPolicy):
            # Equal sizes must not stand in the tables under another name.
            record.console.print(f"  left out: {name}: its sizes are always equal, so it has not been built yet")
            continue
        known.append(name)
    return known


# In the workers.


def _train_all(rank, work, tell):
    """Every scheme from every seed, as `{scheme: [run, ...]}`."""
    arrays = {name: torch.from_numpy(array) for name, array in read_digits().items()}
    runs = {scheme: [] for scheme in work["schemes"]}
    for seed in work["seeds"]:
        for scheme in work["schemes"]:
            run = _train(rank, scheme, seed, work["epochs"], arrays)
            runs[scheme].append(run)
            if rank == 0:
                tell(f"  seed {seed} {scheme}: loss {run['losses'][-1]:.4f}, accuracy {run['accuracy']:.4f}")
    return runs


def _train(rank, scheme, seed, epochs, arrays):
    torch.manual_seed(seed)
    model = network()
    model, optimizer, loader = evenstep.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM),
        DataLoader(TensorDataset(arrays["train_images"], arrays["train_digits"]), batch_size=1, shuffle=True),
        scheme=scheme,
        global_batch_size=BATCH,
        seed=seed,
        emulate=clusters.cluster_of(clusters.proportional(SPEEDS, BATCH, SECONDS)),
    )
    losses, sizes, iterations = [], [], 0
    for _ in range(epochs):
        for images, digits in loader:
            loss = cross_entropy(model(images), digits)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            iterations += 1
            sizes.append(loader.current.sizes.tolist())
            # All have the same weights; the others wait for worker 0, in time that counts nowhere here.
            if rank == 0 and iterations % EVERY == 0:
                losses.append(_evaluate(model.module, arrays["train_images"], arrays["train_digits"])[0])
    _, accuracy = _evaluate(model.module, arrays["test_images"], arrays["test_digits"])
    dist.barrier()
    # A script prepares once and ends; here the threads of one run must not run on in the next.
    loader.close()
    changed = [k for k in range(iterations) if k == 0 or sizes[k] != sizes[k - 1]]
    return {
        "seed": seed,
        "iterations": iterations,
        "losses": losses,
        "accuracy": accuracy,
        "sizes": [f"{k}: {'/'.join(map(str, sizes[k]))}" for k in changed],
    }


def _evaluate(module, images, digits):
    module.eval()
    with torch.no_grad():
        scores = module(images)
    module.train()
    return float(cross_entropy(scores, digits)), int((scores.argmax(dim=1) == digits).sum()) / len(digits)


# What is shown.


def _updates(run, target):
    """Updates until the evaluation that first found the target; None where none did."""
    return next((EVERY * number for number, loss in enumerate(run["losses"], start=1) if loss <= target), None)


def _reached(of_scheme):
    """Updates to the target by seed; a run that never reached it counts all of its own."""
    return [run["updates_to_target"] or run["iterations"] for run in of_scheme]


def _differences(raw, scheme, value):
    """From the baseline's, paired by seed."""
    return [ours - theirs for ours, theirs in zip(value(raw[scheme]), value(raw[BASELINE]), strict=True)]


def _accuracies(of_scheme):
    return [run["accuracy"] for run in of_scheme]


def _noise(raw, value, least):
    """The baseline's standard deviation over seeds, and no less than what can be told apart."""
    return max(stdev(value(raw[BASELINE])), least)


def _figures(raw):
    """Mean paired differences, over the noise; and of the training loss at the same update, the largest of all."""
    test_image = 1 / 360
    figures = [record.figure(f"updates to the target, {scheme}", _reached(raw[scheme])) for scheme in raw]
    for scheme in raw:
        if scheme == BASELINE:
            continue
        updates = abs(mean(_differences(raw, scheme, _reached))) / _noise(raw, _reached, EVERY)
        accuracy = abs(mean(_differences(raw, scheme, _accuracies))) / _noise(raw, _accuracies, test_image)
        goal = "<= 1" if scheme in SAME else None
        figures += [
            record.figure(f"{scheme}: updates, difference from {BASELINE} over seed noise", [updates], goal=goal),
            record.figure(f"{scheme}: accuracy, difference from {BASELINE} over seed noise", [accuracy], goal=goal),
            record.figure(f"{scheme}: largest difference of training loss",
                          [max(abs(a - b) for ours, theirs in zip(raw[scheme], raw[BASELINE], strict=True)
                               for a, b in zip(ours["losses"], theirs["losses"], strict=True))],
                          goal="<= 0.001" if scheme in SAME else None),
        ]  # fmt: skip
    return figures


def _table(raw):
    def of_seed(run):
        return "never" if run["updates_to_target"] is None else str(run["updates_to_target"])

    return record.table(
        "By seed",
        ("scheme", "updates to the target", "mean difference", "final test accuracy", "mean difference", "last sizes"),
        [
            [
                scheme,
                " ".join(map(of_seed, of_scheme)),
                f"{mean(_differences(raw, scheme, _reached)):+.2f}",
                " ".join(f"{run['accuracy']:.4f}" for run in of_scheme),
                f"{mean(_differences(raw, scheme, _accuracies)):+.4f}",
                # Of the last full slice: the last change is to the epoch's short one.
                next(
                    text.split(": ")[1]
                    for text in reversed(of_scheme[0]["sizes"])
                    if sum(map(int, text.split(": ")[1].split("/"))) == BATCH
                ),
            ]
            for scheme, of_scheme in raw.items()
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
