"""What four training loops gain: a plain one, Lightning, Accelerate and Transformers, with and without evenstep.

Three workers, the last one four times slower: the model sleeps for every sample that it computes on, under evenstep and
without it alike. The rate is that of worker 0's forward passes after the first ones. The variants take turns.

What a wrapper does in an iteration beside a plain loop takes as long with equal sizes as with uneven ones, so it is a
larger part of the shorter iteration. "With its own time alone" is the gain of a wrapper that added this to the plain
loop's iteration with evenstep, and nothing else; what the gain lacks of that is evenstep's.
"""

import os
import sys
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
from harness import record
from harness.workers import run_workers
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

WORKERS, BATCH, SLOWNESS, PER_SAMPLE = 3, 32, (1, 1, 4), 0.002
ITERATIONS, WARMUP, FEATURES = 45, 20, 16
WRAPPERS = ("plain loop", "lightning", "accelerate", "transformers")
IDEAL = sum(1 / (slow * PER_SAMPLE) for slow in SLOWNESS)


class Model(torch.nn.Module):
    """A small network on an emulated device, with an output as Transformers asks for it."""

    def __init__(self, rank):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(FEATURES, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        self.seconds, self.begun = SLOWNESS[rank] * PER_SAMPLE, []

    def forward(self, inputs, labels):
        self.begun.append(time.perf_counter())
        time.sleep(self.seconds * len(inputs))
        return {"loss": torch.nn.functional.mse_loss(self.layers(inputs), labels)}


def main():
    parser = record.arguments(__doc__.partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    iterations = WARMUP + 4 if options.quick else ITERATIONS
    repetitions = 1 if options.quick else options.repetitions
    rates = {(wrapper, even): [] for wrapper in WRAPPERS for even in (True, False)}
    for repetition in range(repetitions):
        for wrapper, even in rates:
            rate = run_workers(WORKERS, _measure, (wrapper, even, iterations, options.seed), record.console.print)
            rates[wrapper, even].append(rate)
            way = "with evenstep" if even else "without"
            record.console.print(f"  {repetition + 1}/{repetitions} {wrapper}, {way}: {rate:.0f} samples/s")
    gains = {
        wrapper: [ours / equal for ours, equal in zip(rates[wrapper, True], rates[wrapper, False], strict=True)]
        for wrapper in WRAPPERS
    }
    plain = gains["plain loop"]
    figures = [
        *(
            record.figure(f"{wrapper}: gain, of the plain loop's", _ratios(gains[wrapper], plain), goal=">= 0.97")
            for wrapper in WRAPPERS[1:]
        ),
        *(
            record.figure(
                f"{wrapper}: gain with its own time alone, of the plain loop's",
                _ratios(_with_own_time(rates, wrapper), plain),
            )
            for wrapper in WRAPPERS[1:]
        ),
        *(record.figure(f"{wrapper}: with evenstep, times without", gains[wrapper]) for wrapper in WRAPPERS),
        *(
            record.figure(f"{wrapper}: with evenstep, of the ideal", [rate / IDEAL for rate in rates[wrapper, True]])
            for wrapper in WRAPPERS
        ),
    ]
    record.publish(
        "integrations",
        f"{WORKERS} workers, speeds 1:1:1/4, in four training loops",
        options,
        config={
            "workers": WORKERS,
            "batch_size": BATCH,
            "slowness": SLOWNESS,
            "seconds_per_sample": PER_SAMPLE,
            "iterations": iterations,
            "warmup": WARMUP,
            "repetitions": repetitions,
            "scheme": "lb-bsp",
            "versions": _versions(),
        },
        figures=figures,
        raw={f"{wrapper}, {'with' if even else 'without'}": values for (wrapper, even), values in rates.items()},
    )
    return 0


def _with_own_time(rates, wrapper):
    """In each repetition: the wrapper's gain, if it took as much longer than the plain loop as with equal sizes."""
    pairs = zip(rates[wrapper, False], rates["plain loop", False], rates["plain loop", True], strict=True)
    return [1 / without / (1 / even + 1 / without - 1 / equal) for without, equal, even in pairs]


def _ratios(ours, theirs):
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]


def _versions():
    from importlib.metadata import version

    return {name: version(name) for name in ("lightning", "accelerate", "transformers")}


def _measure(rank, argument, tell):
    """Samples per second of all workers after the warm-up."""
    wrapper, even, iterations, seed = argument
    warnings.simplefilter("ignore")
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORKERS, "LOCAL_WORLD_SIZE": WORKERS, "GROUP_RANK": 0}
    os.environ.update({name: str(value) for name, value in local.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="none", ACCELERATE_USE_CPU="1")
    torch.manual_seed(seed)
    samples = WORKERS * BATCH * iterations
    data = TensorDataset(torch.randn(samples, FEATURES), torch.randn(samples, 1))
    model = Model(rank)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        LOOPS[wrapper](model, data, even)
        os.chdir("/")
    dist.barrier()
    begun = model.begun[WARMUP:]
    return WORKERS * BATCH * (len(begun) - 1) / (begun[-1] - begun[0])


def _plain_loop(model, data, even):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if even:
        import evenstep

        loader = DataLoader(data, batch_size=BATCH)
        model, optimizer, loader = evenstep.prepare(model, optimizer, loader, scheme="lb-bsp")
    else:
        loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, shuffle=False))
        model = DistributedDataParallel(model)
    for inputs, labels in loader:
        optimizer.zero_grad()
        model(inputs, labels)["loss"].backward()
        optimizer.step()


def _lightning(model, data, even):
    fit_lightning(model, data, even, BATCH)


def fit_lightning(model, data, even, batch_size, **options):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, index):
            return self.model(*batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    strategy = "ddp"
    if even:
        from evenstep.integrations.lightning import EvenstepStrategy

        strategy = EvenstepStrategy("lb-bsp")
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=WORKERS, max_epochs=1, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(data, batch_size=batch_size))


def _accelerate(model, data, even):
    if even:
        from evenstep.integrations.accelerate import Accelerator

        accelerator = Accelerator(cpu=True, scheme="lb-bsp")
    else:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=BATCH))
    for inputs, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(model(inputs, labels)["loss"])
        optimizer.step()


def _transformers(model, data, even):
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    options = {}
    if even:
        from evenstep.integrations.transformers import EvenstepTrainer as Trainer

        options = {"evenstep": {"scheme": "lb-bsp"}}
    arguments = TrainingArguments(
        output_dir=".", use_cpu=True, num_train_epochs=1, per_device_train_batch_size=BATCH, learning_rate=0.01,
        save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True, max_grad_norm=0.0,
    )  # fmt: skip
    rows = [{"inputs": inputs, "labels": labels} for inputs, labels in data]
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, **options)
    trainer.remove_callback(PrinterCallback)
    trainer.train()


LOOPS = dict(zip(WRAPPERS, (_plain_loop, _lightning, _accelerate, _transformers), strict=True))


if __name__ == "__main__":
    sys.exit(main())
