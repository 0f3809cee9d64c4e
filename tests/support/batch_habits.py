"""Loaders whose batches a script makes in its own way; each trains as in one process without evenstep."""

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

import evenstep
from evenstep.schemes import Scheme
from evenstep.testing.scripted import Scripted
from support.processes import CONTEXT

WORKERS = 3
EPOCHS = 2
SAMPLES = 47
SCHEMES = {
    "bsp": {"scheme": "bsp"},
    "sizes that always change": {"scheme": Scheme(name="scripted", load=Scripted(seed=11))},
}


class Sentences(Dataset):
    """Sample i has its index, some features and a truth value."""

    def __init__(self, length=SAMPLES):
        generator = torch.Generator().manual_seed(1)
        self.features = torch.randn(length, 4, dtype=torch.float64, generator=generator)

    def __len__(self):
        return len(self.features)

    def __getitem__(self, index):
        return index, self.features[index], (self.features[index].sum() > 0).double()


class Buckets:
    """Batches of sentences of like lengths, in an order that depends on the epoch, as bucketing samplers give them."""

    def __init__(self, batch_size=12, length=SAMPLES):
        self.batch_size = batch_size
        self.length = length
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def batches(self):
        buckets = [list(range(bucket, self.length, 4)) for bucket in range(4)]  # 12, 12, 12 and 11.
        # By tokens: long sentences make short batches.
        cut = [part for bucket in buckets for part in ([bucket] if bucket[0] % 2 else [bucket[:4], bucket[4:]])]
        order = torch.randperm(len(cut), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return [cut[at] for at in order]

    def __len__(self):
        return len(self.batches())

    def __iter__(self):
        yield from self.batches()


class Strange(Buckets):
    def __iter__(self):
        yield from ([1, 2], "ab")


class Short(Buckets):
    def __iter__(self):
        yield from ([1, 2, 3, 4], [5, 6])


class Endless(Buckets):
    def __iter__(self):
        while True:
            yield [1, 2]


def processes():
    return {"num_workers": 2, "multiprocessing_context": CONTEXT}


def train(loader, prepare, *, limit=None, weighed=False):
    """A loop that fails on a batch of one sample; the weights, and what each iteration was trained on."""
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    model, optimizer, loader = prepare(model, optimizer, loader)
    seen, lengths, real = [], [len(loader)], []
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        seen.append([])
        for indices, features, targets in loader:
            optimizer.zero_grad()
            units = indices % 3 + 1 if weighed else torch.ones_like(indices)
            if weighed:
                loader.weigh_by(int(units.sum()))
            losses = binary_cross_entropy_with_logits(model(features).squeeze(), targets, reduction="none")
            ((units * losses).sum() / units.sum()).backward()
            optimizer.step()
            own = loader.current.samples
            seen[-1].append(indices[:own].tolist())
            real.append((own, len(indices)))
            if len(seen[-1]) == limit:
                break
        lengths.append(len(loader))
    weights = [each for parameter in model.parameters() for each in parameter.flatten().tolist()]
    return {"weights": weights, "seen": seen, "lengths": lengths, "real": real}


def alone(slices, *, weighed):
    """What `train` comes to in one process without evenstep, on these slices of each epoch."""

    class Whole:
        def __init__(self):
            self.data = Sentences()
            self.epoch = 0

        def __len__(self):
            return len(slices[0])

        def set_epoch(self, epoch):
            self.epoch = epoch

        def weigh_by(self, count):
            """There is no other worker."""

        def __iter__(self):
            for part in slices[self.epoch]:
                self.current = type("Share", (), {"samples": len(part)})
                yield torch.utils.data.default_collate([self.data[index] for index in part])

    return train(Whole(), lambda *given: given, weighed=weighed)


def loaders():
    """By name: the loader, options of `prepare`, and when to leave each epoch."""
    data = Sentences()
    return {
        "buckets": (DataLoader(data, batch_sampler=Buckets()), {}, None),
        "buckets in processes": (DataLoader(data, batch_sampler=Buckets(), **processes()), {}, None),
        "buckets longer than was said": (DataLoader(data, batch_sampler=Buckets()), {"global_batch_size": 9}, None),
        "a plain batch sampler": (
            DataLoader(data, batch_sampler=BatchSampler(range(SAMPLES), 5, drop_last=True)),
            {},
            None,
        ),
        "a length without end": (DataLoader(data, batch_size=5, sampler=endless(data)), {}, 6),
        "a length without end in processes": (
            DataLoader(data, batch_size=5, sampler=endless(data), **processes()),
            {},
            6,
        ),
        "permutations without end": (
            DataLoader(data, batch_size=5, sampler=RandomSampler(data, num_samples=10**10)),
            {},
            7,
        ),
        "shrink": (DataLoader(data, batch_size=5, shuffle=True), {"empty": "shrink"}, None),
        "copy": (DataLoader(data, batch_size=5, shuffle=True), {}, None),
        # The last slice of 5 gives a worker one sample, twice.
        "units": (DataLoader(data, batch_size=2, shuffle=True), {}, None),
    }


def endless(data):
    """As in minGPT."""
    return RandomSampler(data, replacement=True, num_samples=int(1e10))


def refused():
    """By name: a loader, options, and a part of the sentence."""
    data = Sentences()
    return {
        "strange": ((data, Strange()), {}, "gives something else than indices of the dataset"),
        "without end": ((data, Endless()), {}, "gave 13 lists where its length says 6"),
        "no length": ((data, [[1], [2]].__iter__()), {}, "has no length"),
        "of unknown size": ((data, [[1, 2, 3], [4, 5, 6]]), {}, "does not say how long its lists are"),
        "shrink of too little": ((Sentences(2), None), {"empty": "shrink"}, "2 samples leaves some of 3 workers"),
        "shrink of a short list": ((data, Short()), {"empty": "shrink"}, "gave a list of 2 samples for 3 workers"),
        "another word": ((data, None), {"empty": "drop"}, "empty must be 'copy' or 'shrink', not 'drop'"),
    }


def together():
    """What every loader came to under every scheme, and the sentences of those that are refused."""
    found = {}
    for scheme, options in SCHEMES.items():
        for name, (loader, more, limit) in loaders().items():
            if scheme != "sizes that always change" and name.endswith("in processes"):
                continue
            found[scheme, name] = prepared(loader, limit, weighed=name == "units", seed=7, **options, **more)
    for name, ((data, lists), options, _) in refused().items():
        loader = DataLoader(data, batch_size=5) if lists is None else DataLoader(data, batch_sampler=lists)
        try:
            prepared(loader, None, **{"scheme": "bsp", **options})
            found[name] = "was trained"
        except evenstep.ConfigError as error:
            found[name] = str(error)
    found["resumed"] = resume()
    return found


def prepared(loader, limit, weighed=False, **options):
    made = []

    def prepare(*given):
        made[:] = evenstep.prepare(*given, timeout=120.0, **options)
        return tuple(made)

    try:
        return train(loader, prepare, limit=limit, weighed=weighed)
    finally:
        if made:
            made[2].close()


def resume():
    """By name of a loader: the union batches of an epoch, and of the same epoch left after 3 and resumed."""
    found = {}
    for name in ("buckets", "a length without end", "shrink"):
        found[name] = [hand_outs(name, None), hand_outs(name, 3)]
    return found


def hand_outs(name, stop):
    taken, state = [], None
    for until in (stop, 6):
        if until is None:
            continue
        loader, options, _ = loaders()[name]
        model = torch.nn.Linear(4, 1, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        model, optimizer, loader = evenstep.prepare(model, optimizer, loader, seed=7, timeout=120.0, **options)
        with loader:
            loader.set_epoch(1)
            if state is not None:
                loader.load_state_dict(state)
            for indices, features, _ in loader:
                model(features).sum().backward()
                optimizer.step()
                taken.append(indices[: loader.current.samples].tolist())
                if len(taken) == until:
                    break
            state = loader.state_dict()
    return taken
