"""Workers that each read a stream, or a dataset, of their own, for `run_workers`."""

import io
import warnings

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

import evenstep
from evenstep.torch.data import own_data
from support.training import FEATURES, model_of, optimizer_of, step, weights


def rows_of(rank, count):
    """Samples of which the first value says which they are: (worker, number)."""
    rows = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(100 + rank), dtype=torch.float64)
    rows[:, 0] = torch.arange(count) / 1000 + rank
    return rows.float().double()  # datasets gives float32.


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
    if kind in ("map", "stateful map"):
        dataset, options = TensorDataset(rows, targets_of(rows)), {"shuffle": True, **options}
    else:
        dataset = Stream(rows, dict if kind == "dicts" else tuple)
    return loader_class(kind)(dataset, batch_size=batch_size, num_workers=processes, **options)


def loader_class(kind):
    if not kind.startswith("stateful"):
        return DataLoader
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader


def train(run, kind, counts, options):
    """Which of its samples this worker got, by epoch and iteration; the weights, and the state after `stop`."""
    rank, stop, state = dist.get_rank(), options.get("stop"), options.get("state")
    loader = loader_of(kind, rank, counts[rank], batch_size=run.batch_size, processes=run.num_workers)
    model = model_of(run)
    model, optimizer, loader = evenstep.prepare(
        model, optimizer_of(run, model), loader, scheme=run.chosen_scheme(), seed=run.seed, **run.options
    )
    seen, sizes, ends, kept, first = [], [], [], None, 0
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
                ends.append(loader.current.ends_epoch)
                step(model, optimizer, rows, targets)
                if loader.iteration == stop:
                    file = io.BytesIO()
                    torch.save((model.module.state_dict(), optimizer.state_dict()), file)
                    kept = loader.state_dict(), file.getvalue()
            assert ends[-len(seen[-1]) :] == [False] * (len(seen[-1]) - 1) + [True]
        return {"seen": seen, "sizes": sizes, "weights": weights(model), "state": kept}


def numbers_of(rows, rank):
    return np.rint((rows[:, 0].numpy() - rank) * 1000).astype(int).tolist()


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


def prepared(loader, **options):
    model = torch.nn.Linear(FEATURES, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return evenstep.prepare(model, optimizer, loader, **{"scheme": "bsp", **options})


def train_on(model, optimizer, loader):
    for rows, targets in loader:
        step(model, optimizer, rows, targets)


def count_meetings(run, counts):
    """How often workers met for words, which other messages did not bring."""
    rank, meetings = dist.get_rank(), []
    gather = own_data.gather
    own_data.gather = lambda *arguments: meetings.append(1) or gather(*arguments)
    model, optimizer, loader = prepared(loader_of("tuples", rank, counts[rank], batch_size=run.batch_size))
    for _ in range(run.epochs):
        train_on(model, optimizer, loader)
    return {"iterations": loader.iteration, "meetings": len(meetings)}


class Rows(IterableDataset):
    """Whatever batches it is given."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def batches_of(*batches, **options):
    """A loader that gives these batches as they are."""
    return DataLoader(Rows(batches), **{"batch_size": None, "collate_fn": lambda batch: batch, **options})


def own_stream(**options):
    return loader_of("tuples", dist.get_rank(), 20, **options)


def unlike(*shape):
    return torch.full(shape, float(dist.get_rank()), dtype=torch.float64)


REFUSED = [
    (own_stream, {"scheme": "local-sgd"}, "give loaders over map-style datasets and leave out uneven"),
    (own_stream, {"cost": [1.0] * 20}, "cost= divides slices of a dataset that all workers have"),
    (own_stream, {"accumulation": 2}, "here each has data of its own: leave them out"),
    (own_stream, {"scheme": "lb-bsp:micro_batch=2"}, "here each has data of its own: leave them out"),
    (own_stream, {"empty": "shrink"}, "leave out empty"),
    (own_stream, {"partition": "common"}, 'leave out partition="common"'),
    (own_stream, {"uneven": "maybe"}, "uneven must be 'continue' or 'stop', not 'maybe'"),
    (
        lambda: DataLoader(TensorDataset(torch.zeros(20, FEATURES)), batch_size=4),
        {"uneven": "stop"},
        'leave it out, or give partition="private"',
    ),
    (lambda: loader_of("tuples", 0, 20), {}, "the loaders of workers 0 and 1 began with the same samples"),
    (
        lambda: loader_of("tuples", dist.get_rank(), 20 * (1 - dist.get_rank())),
        {},
        "the loader of worker 1 gave no sample in this epoch",
    ),
    (lambda: batches_of(unlike(3, 2)), {}, "give prepare a global_batch_size"),
    (lambda: batches_of(unlike(3, 2), {"a": 3}), {"global_batch_size": 12}, "batches of a worker's own data are cut"),
    (lambda: batches_of((unlike(3, 2), unlike(2))), {"global_batch_size": 6}, "with a row for each sample"),
    (lambda: batches_of(unlike(3, 2), unlike(3, 4)), {"global_batch_size": 12}, "cannot be joined by rows"),
]


def refused(case):
    """Trains with what cannot work; by its loader, the options, and what is said."""
    loader, options, _ = REFUSED[case]
    train_on(*prepared(loader(), **options))


def fail():
    """Worker 0's stream fails in the third iteration."""
    rank = dist.get_rank()
    dataset = Stream(rows_of(rank, 40), fails_at=10 if rank == 0 else None)
    train_on(*prepared(DataLoader(dataset, batch_size=4)))


def leave_alone(late):
    """Worker 1 leaves its first loop in the fourth iteration, before or after the step, and begins the next."""
    model, optimizer, loader = prepared(loader_of("tuples", dist.get_rank(), 60))
    for _ in range(2):
        for rows, targets in loader:
            leaves = dist.get_rank() == 1 and loader.iteration == 4
            if leaves and not late:
                break
            step(model, optimizer, rows, targets)
            if leaves:
                break


class Shuffled(Stream):
    """Its order is drawn from the script's random numbers."""

    def __iter__(self):
        self.rows = self.rows[torch.randperm(len(self.rows))]
        yield from super().__iter__()


def resume_in_another_order():
    """The warnings of a run that goes on with a stream whose order no seed fixes; and of one whose order is fixed."""
    told, kept = [], None
    for kind in (Shuffled, Stream):
        for resumes in (False, True):
            rows = rows_of(dist.get_rank(), 20)
            model, optimizer, loader = prepared(DataLoader(kind(rows), batch_size=4))
            with loader, warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if resumes:
                    loader.load_state_dict(kept)
                for inputs, targets in loader:
                    step(model, optimizer, inputs, targets)
                    if not resumes and loader.iteration == 2:
                        kept = loader.state_dict()
                        break
            told.append([str(each.message) for each in caught])
    return told


def begin_alike():
    """Both workers' streams begin with the same rows, which only the script can know to be right."""
    rows = [rows_of(9, 4), rows_of(dist.get_rank(), 12)]
    model, optimizer, loader = prepared(DataLoader(Stream(torch.cat(rows)), batch_size=4), partition="private")
    train_on(model, optimizer, loader)
    return loader.iteration


def ask():
    loader = prepared(own_stream())[2]
    told = []
    for call in (lambda: len(loader), lambda: loader.start_at(2)):
        try:
            call()
        except (TypeError, evenstep.ConfigError) as error:
            told.append(str(error).split(": ")[1])
    return told


WRONG_STATES = [
    ("fewer workers", "is of data of 3 workers' own and the run has data of 2 workers' own"),
    ("common", "this loader state is of a common dataset and the run has data of 2 workers' own"),
    ("own", "resume with the dataset that it was taken on"),
    ("less data", "gave 20 samples and the state was taken after 50 of them"),
]


def resume_wrongly(case):
    rank = dist.get_rank()
    common = DataLoader(TensorDataset(rows_of(0, 20), targets_of(rows_of(0, 20))), batch_size=4)
    with prepared(common if case == "common" else own_stream())[2] as loader:
        state = loader.state_dict()
    if case == "fewer workers":
        state["taken"] = [0, 0, 0]
    elif case == "less data":
        state.update(taken=[50, 50], iteration=3)
    model, optimizer, loader = prepared(common if case == "own" else own_stream())
    try:
        loader.load_state_dict(state)
        train_on(model, optimizer, loader)
    except evenstep.ConfigError as error:
        return str(error)
    return f"worker {rank} was told nothing"


SHARDS, LENGTH = 6, 90


def write_shards(folder):
    """As webdataset writes them: 6 shards of 15 samples."""
    import webdataset

    rows = rows_of(0, LENGTH).numpy()
    with webdataset.ShardWriter(f"{folder}/%d.tar", maxcount=LENGTH // SHARDS, verbose=0) as writer:
        for number, row in enumerate(rows):
            writer.write({"__key__": f"{number:04d}", "row.npy": row})


def of_webdataset(folder, run):
    import webdataset

    shards = webdataset.WebDataset(
        f"{folder}/{{0..{SHARDS - 1}}}.tar", nodesplitter=webdataset.split_by_node, shardshuffle=False
    )
    samples = shards.shuffle(10, seed=1).decode().to_tuple("row.npy")
    return DataLoader(samples.batched(run.batch_size), batch_size=None, num_workers=run.num_workers)


def of_datasets(_, run):
    import datasets
    from datasets.distributed import split_dataset_by_node

    rows = rows_of(0, LENGTH).tolist()
    whole = datasets.Dataset.from_dict({"row": rows}).cast_column("row", datasets.List(datasets.Value("float64")))
    stream = whole.to_iterable_dataset(num_shards=SHARDS).shuffle(seed=1, buffer_size=10).with_format("torch")
    own = split_dataset_by_node(stream, dist.get_rank(), dist.get_world_size())
    return DataLoader(own, batch_size=run.batch_size, num_workers=run.num_workers)


def train_on_shards(run, kind, folder):
    """As `train`, of the shards of a library; numbers are of the whole data."""
    model = model_of(run)
    loader = (of_webdataset if kind == "webdataset" else of_datasets)(folder, run)
    model, optimizer, loader = evenstep.prepare(
        model, optimizer_of(run, model), loader, scheme=run.chosen_scheme(), seed=run.seed, **run.options
    )
    seen = []
    with loader:
        for _ in range(run.epochs):
            seen.append([])
            for batch in loader:
                rows = (batch["row"] if kind == "datasets" else batch[0]).double()
                seen[-1].append(numbers_of(rows[: loader.current.samples], 0))
                step(model, optimizer, rows, targets_of(rows))
        return {"seen": seen, "weights": weights(model)}


def train_with_checkpoints(run, counts, folder, stop):
    """Leaves its loop after `stop` iterations, on whose last batch it has not stepped; or goes on from there."""
    rank = dist.get_rank()
    model = model_of(run)
    loader = loader_of("tuples", rank, counts[rank], batch_size=run.batch_size)
    model, optimizer, loader = evenstep.prepare(model, optimizer_of(run, model), loader, scheme=run.chosen_scheme())
    evenstep.checkpoint.restore(folder, model, optimizer, loader)
    seen = []
    for _ in range(loader.epoch, run.epochs):
        for rows, targets in loader:
            loss = torch.nn.functional.mse_loss(model(rows), targets)
            if len(seen) == stop:
                evenstep.checkpoint.save(folder, model, optimizer, loader)
                return {"seen": seen, "weights": weights(model)}
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(numbers_of(rows[: loader.current.samples], rank))
    return {"seen": seen, "weights": weights(model)}


def loop_as_scripts_do(run, counts):
    """Looks at a batch before training, fetches batches ahead, and leaves the first epoch early."""
    rank = dist.get_rank()
    model = model_of(run)
    model, optimizer, loader = evenstep.prepare(
        model,
        optimizer_of(run, model),
        loader_of("tuples", rank, counts[rank], batch_size=run.batch_size, processes=run.num_workers),
        scheme=run.chosen_scheme(),
    )
    next(iter(loader))
    seen = []
    for epoch in range(2):
        seen.append([])
        ahead = iter(loader)
        batch, share = next(ahead), loader.newest
        while batch is not None:
            following = next(ahead, None)
            seen[-1].append(numbers_of(batch[0][: share.samples], rank))
            step(model, optimizer, *batch)
            batch, share = following, loader.newest
            if epoch == 0 and len(seen[-1]) == 3:
                break
        del ahead
    return {"seen": seen, "weights": weights(model), "epoch": loader.epoch}


def take_turns(run):
    """A session with a stream of each worker's own and a dataset that all have, in turns."""
    rank = dist.get_rank()
    session = evenstep.Session(run.chosen_scheme())
    model = session.model(model_of(run))
    optimizer = session.optimizer(optimizer_of(run, model.module))
    own = session.loader(loader_of("tuples", rank, 20, batch_size=run.batch_size))
    rows = rows_of(9, 18)
    common = session.loader(DataLoader(TensorDataset(rows, targets_of(rows)), batch_size=run.batch_size))
    seen = []
    for loader in (common, own, common):
        for batch in loader:
            step(model, optimizer, *batch)
        seen.append(loader.iteration)
    return {"iterations": seen, "length": len(common), "weights": weights(model)}
