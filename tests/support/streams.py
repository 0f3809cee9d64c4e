"""Workers that each read a stream, or a dataset, of their own, for `run_workers`."""

import io

import numpy as np
import torch
import torch.distributed as dist
from support.training import FEATURES, model_of, optimizer_of, step, weights
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

import evenstep


def rows_of(rank, count):
    """Samples of which the first value says which they are: (worker, number)."""
    rows = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(100 + rank), dtype=torch.float64)
    rows[:, 0] = torch.arange(count) / 10 + 1000 * rank
    return rows


def targets_of(rows):
    return rows[:, 1:].sum(1, keepdim=True).sin()


class Stream(IterableDataset):
    """This worker's rows, of which each data worker reads its own part; another order in each epoch."""

    def __init__(self, rows, form=tuple, fails_at=None):
        self.rows, self.form, self.fails_at = rows, form, fails_at
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        part = slice(None) if info is None else slice(info.id, None, info.num_workers)
        for number, row in enumerate(self.rows.roll(self.epoch, 0)[part]):
            if number == self.fails_at:
                raise OSError("the file is gone")
            target = targets_of(row[None])[0]
            yield (row, target) if self.form is tuple else {"rows": row, "targets": target, "name": f"{number}"}


def loader_of(kind, rank, count, *, batch_size=4, processes=0, **options):
    rows = rows_of(rank, count)
    if kind == "map":
        dataset, options = TensorDataset(rows, targets_of(rows)), {"shuffle": True, **options}
    else:
        dataset = Stream(rows, dict if kind == "dicts" else tuple)
    return DataLoader(dataset, batch_size=batch_size, num_workers=processes, **options)


def train(run, kind, counts, options):
    """Which of its samples this worker got, by epoch and iteration; the weights, and the state after `stop`."""
    rank, stop, state = dist.get_rank(), options.get("stop"), options.get("state")
    loader = loader_of(kind, rank, counts[rank], batch_size=run.batch_size, processes=run.num_workers)
    model = model_of(run)
    model, optimizer, loader = evenstep.prepare(
        model, optimizer_of(run, model), loader, scheme=run.chosen_scheme(), seed=run.seed, **run.options
    )
    seen, sizes, kept, first = [], [], None, 0
    with loader:
        if state is not None:
            of_loader, tensors = state
            loader.load_state_dict(of_loader)
            of_model, of_optimizer = torch.load(io.BytesIO(tensors))
            model.module.load_state_dict(of_model)
            optimizer.load_state_dict(of_optimizer)
            first = loader.epoch
        for _ in range(first, run.epochs):
            seen.append([])
            for batch in loader:
                rows, targets = (batch["rows"], batch["targets"]) if kind == "dicts" else batch
                assert len(rows) == len(targets) == len(loader.current.positions)
                seen[-1].append(numbers_of(rows[: loader.current.samples], rank))
                sizes.append(loader.current.sizes.tolist())
                step(model, optimizer, rows, targets)
                if loader.iteration == stop:
                    file = io.BytesIO()
                    torch.save((model.module.state_dict(), optimizer.state_dict()), file)
                    kept = loader.state_dict(), file.getvalue()
        return {"seen": seen, "sizes": sizes, "weights": weights(model), "state": kept}


def numbers_of(rows, rank):
    return np.rint((rows[:, 0].numpy() - 1000 * rank) * 10).astype(int).tolist()


def train_alone(run, counts, found):
    """The same mathematics in one process: each step on the union of what the workers got."""
    model = model_of(run)
    optimizer = optimizer_of(run, model)
    data = [rows_of(rank, count) for rank, count in enumerate(counts)]
    for epochs in zip(*found, strict=True):
        for batches in zip(*epochs, strict=True):
            rows = torch.cat([own[numbers] for own, numbers in zip(data, batches, strict=True)])
            step(model, optimizer, rows, targets_of(rows))
    return weights(model)
