"""Samples that cost differently: sharing out by predicted seconds, by count, in groups of like length, by equal cost.

Real DistributedDataParallel over Gloo, 64 texts an iteration of 4 workers. Each worker sleeps before its backward for
as long as its device would take for its tokens, whichever contestant it runs, so seconds follow cost on all of them
alike. The cases:

* `packed`: a batch has the tokens of its texts. Lengths are log-normal (sigma 1, as of text corpora; at most 16 times
  the median).
* `padded`: a collate function pads each batch to its longest text, as most training of texts does, and padding takes as
  long as tokens. The same lengths.
* `padded docstrings`: the same, with the lengths of the docstrings in the standard library's modules.

The contestants:

* `ddp`: as many texts for each worker, in random order
* `ddp, grouped`: the same, in groups of like length (sorted in megabatches of 50 iterations, as `group_by_length`
  does), so that the texts of a global batch are alike
* `ddp, equal cost`: unequal counts so that the cost of each worker is equal: the rule of the Transformers library's
  rebalancing sampler, reimplemented. Of padded texts it sorts each global batch, and cuts it where all parts cost
  alike. (Its gradients are not weighed here, which takes no time.)
* `lb-bsp`: sizes follow speed, without `cost=`
* `lb-bsp, cost`: with `cost=`, which of padded texts is `evenstep.Padded`
* `lb-bsp, cost, grouped`: the same, with groups of like length as the loader's sampler; padded texts only

Each figure is the part of the ideal: tokens per second, without padding, over the sum of the devices' speeds.
"""

import ast
import gc
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from harness import record
from harness.workers import run_workers
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import evenstep
from evenstep.core.samples.balanced import balanced
from evenstep.core.samples.padded import balanced_padded
from evenstep.core.values import UNLIMITED

CLUSTERS = {"equal": (1, 1, 1, 1), "1:1:2:4": (1, 1, 2, 4)}
CASES = {"packed": 0.25, "padded": 0.11, "padded docstrings": 0.11}
"""The seconds of an iteration of mean length, at best."""
PADDING = {"ddp": 0.4, "lb-bsp": 0.4}
"""By how much these are scaled for contestants that padding takes several times as long, so that all take a while."""
CONTESTANTS = ("ddp", "ddp, grouped", "ddp, equal cost", "lb-bsp", "lb-bsp, cost", "lb-bsp, cost, grouped")
EACH, WARMUP, PLAIN_WARMUP, MEGABATCH = 16, 12, 2, 50
FEATURES, MEDIAN = 16, 100


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=14, help="measured, after the warm-up")
    options = parser.parse_args()
    if options.quick:
        options.repetitions, options.iterations = 1, 4
    docstrings = _docstrings()
    plan = options.seed, options.repetitions, options.iterations, docstrings
    raw = run_workers(4, _measure, plan, show=record.console.print)
    done = record.publish(
        "cost",
        "Part of the ideal with texts of unequal length, 4 workers",
        options,
        config={
            "clusters": CLUSTERS,
            "global_batch_size": 4 * EACH,
            "ideal_seconds": CASES,
            "ideal_seconds_scaled_where_padded": PADDING,
            "warmup": WARMUP,
            "iterations": options.iterations,
            "repetitions": options.repetitions,
            "docstrings": len(docstrings),
        },
        figures=_figures(raw),
        raw=raw,
    )
    return 0 if done else 1


def _figures(raw):
    figures = []
    for case, clusters in raw.items():
        for cluster, parts in clusters.items():
            where = f"{case}, {cluster}"
            figures += [record.figure(f"{where}: {name}, of the ideal", parts[name], goal=_goal(case, cluster, name))
                        for name in _contestants(case)]  # fmt: skip
            for other, goal in _OVER[cluster].items():
                ratios = [ours / theirs for ours, theirs in zip(parts["lb-bsp, cost"], parts[other], strict=True)]
                figures.append(record.figure(f"{where}: lb-bsp, cost, times {other}", ratios, goal=goal))
    for samples, workers, most in ((10_000, 64, 5.0), (4 * EACH, 4, 1000 * CASES["packed"] / 100)):
        for padded in (False, True):
            figures.append(
                record.figure(
                    f"sharing {samples} {'padded ' * padded}samples out to {workers}",
                    _planning(samples, workers, padded=padded),
                    goal=f"<= {most:g}",
                    unit="ms",
                )
            )
    return figures


_OVER = {
    "equal": {"ddp": ">= 1.4", "ddp, equal cost": ">= 1.0", "ddp, grouped": None},
    "1:1:2:4": {"ddp": None, "ddp, equal cost": None, "ddp, grouped": None, "lb-bsp": ">= 1.25"},
}


def _contestants(case):
    """Groups of like length beside equal cost are for padded texts."""
    return CONTESTANTS[: -1 if case == "packed" else None]


def _goal(case, cluster, name):
    """Padding takes time that the ideal leaves out, so there is a goal only without it."""
    return ">= 0.93" if (case, cluster, name) == ("packed", "1:1:2:4", "lb-bsp, cost") else None


def _planning(samples, workers, *, padded):
    """Milliseconds of a few calls."""
    generator = np.random.default_rng(0)
    speeds, nothing = generator.integers(500, 2000, workers), np.zeros(workers, dtype=np.int64)
    found = []
    for _ in range(9):
        costs = _lengths(generator, samples) * 2**13
        limits = {"lower": nothing, "upper": np.full(workers, UNLIMITED)}
        began = time.perf_counter()
        (balanced_padded if padded else balanced)(costs, speeds, **limits)
        found.append(1000 * (time.perf_counter() - began))
    return found


def _lengths(generator, count):
    """Whole tokens, int64."""
    return np.maximum(np.rint(MEDIAN * np.minimum(generator.lognormal(0, 1, count), 16.0)), 1.0).astype(np.int64)


def _docstrings():
    """The lengths of the docstrings in the standard library's modules, in words, at most 16 times their median."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = [
        len((ast.get_docstring(node, clean=False) or "").split())
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, documented)
    ]
    lengths = np.array([each for each in found if each])
    return np.minimum(lengths, 16 * int(np.median(lengths)))


# On each worker.


def _measure(rank, plan, tell):
    seed, repetitions, iterations, docstrings = plan
    found = {case: {cluster: {name: [] for name in _contestants(case)} for cluster in CLUSTERS} for case in CASES}
    count = 4 * EACH * (WARMUP + iterations)
    for repetition in range(repetitions):
        for case, ideal_seconds in CASES.items():
            generator = np.random.default_rng([seed, repetition])
            lengths = _lengths(generator, count)
            if case == "padded docstrings":
                lengths = generator.choice(docstrings, count)
            for cluster, speeds in CLUSTERS.items():
                texts = _Texts(lengths, padded=case != "packed")
                for name in _contestants(case):
                    # So that an iteration of mean length takes these seconds if no worker waits and nothing is padded.
                    seconds = ideal_seconds * (PADDING.get(name, 1.0) if texts.padded else 1.0)
                    scale = 4 * EACH * lengths.mean() / sum(speeds) / seconds
                    part = _run(name, rank, texts, speeds[rank] * scale, sum(speeds) * scale, seed)
                    found[case][cluster][name].append(part)
                    tell(f"{repetition + 1}/{repetitions} {case}, {cluster}, {name}: {part:.3f} of the ideal")
    return found


class _Texts:
    """A dataset of texts of these lengths, and how a batch of them is made."""

    def __init__(self, lengths, *, padded):
        self.lengths = lengths
        self.padded = padded
        self.features = torch.randn(len(lengths), FEATURES)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return self.features[index], torch.zeros(int(self.lengths[index]), dtype=torch.uint8)

    def collate(self, texts):
        """The features, all tokens that are computed on, and how many of these are no padding."""
        features, tokens = zip(*texts, strict=True)
        joined = pad_sequence(list(tokens), batch_first=True) if self.padded else torch.cat(tokens)
        return torch.stack(features), joined, sum(map(len, tokens))


def _run(name, rank, texts, speed, speeds, seed):
    """The part of the ideal over the measured iterations."""
    gc.collect()  # A collection over all runs before takes as long as an iteration, and came within the same few.
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    closing = None
    if name.startswith("lb-bsp"):
        order = _order(name, texts, seed).tolist()
        loader = DataLoader(texts, batch_size=EACH, sampler=order, collate_fn=texts.collate)
        cost = evenstep.Padded(texts.lengths) if texts.padded else texts.lengths
        cost = {"cost": cost} if "cost" in name else {}
        model, optimizer, batches = evenstep.prepare(model, optimizer, loader, scheme="lb-bsp", seed=seed, **cost)
        closing = batches
    else:
        model = DistributedDataParallel(model)
        batches = (texts.collate([texts[each] for each in own.tolist()]) for own in _parts(name, rank, texts, seed))
    done = torch.zeros(1, dtype=torch.float64)
    for number, (features, tokens, own) in enumerate(batches):
        if number == WARMUP:
            dist.barrier()
            began = time.perf_counter()
        loss = model(features).square().mean()
        real = closing is None or closing.current.samples > 0
        if closing is not None or number >= WARMUP - PLAIN_WARMUP:  # Plain DDP has nothing to learn.
            time.sleep(tokens.numel() / speed)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done += own if number >= WARMUP and real else 0
    dist.barrier()
    seconds = time.perf_counter() - began
    dist.all_reduce(done)
    if closing is not None:
        closing.close()
    return float(done) / seconds / speeds


def _parts(name, rank, texts, seed):
    """The samples of this worker in each iteration, as a plain script would choose them."""
    order = _order(name, texts, seed)
    one = np.ones(4, dtype=np.int64)
    for union in np.split(order, range(4 * EACH, len(order), 4 * EACH)):
        if name == "ddp, equal cost":
            share_out = balanced_padded if texts.padded else balanced
            owners = share_out(texts.lengths[union], one, lower=one, upper=np.full(4, UNLIMITED))
            yield union[owners == rank]
        else:
            yield union[rank::4]


def _order(name, texts, seed):
    """The epoch's order; of those that are grouped sorted by length in megabatches, whose iterations are shuffled."""
    lengths, order = texts.lengths, np.random.default_rng(seed).permutation(len(texts))
    if not name.endswith("grouped"):
        return order
    pieces = [
        piece
        for mega in np.split(order, range(MEGABATCH * 4 * EACH, len(order), MEGABATCH * 4 * EACH))
        for piece in np.split(mega[np.argsort(-lengths[mega], kind="stable")], range(4 * EACH, len(mega), 4 * EACH))
    ]
    return np.concatenate([pieces[each] for each in np.random.default_rng(1).permutation(len(pieces))])


if __name__ == "__main__":
    sys.exit(main())
