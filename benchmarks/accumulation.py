"""What unequal accumulation gains for batches of two: plain PyTorch, a plain loop, and three wrappers.

Three workers, the last one four times slower: the model sleeps for every sample that it computes on, 30 ms on a fast
worker, as in fine-tuning. A step has eight batches of two samples per worker on average. The rate is that of the
optimizer's steps after the first ones. The variants take turns.
"""

import os
import sys
import tempfile
import time
import warnings
from contextlib import nullcontext

import torch
import torch.distributed as dist
from harness import record
from harness.workers import run_workers
from integrations import Model, fit_lightning
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

WORKERS, BATCH, WINDOW, SLOWNESS, PER_SAMPLE = 3, 2, 8, (1, 1, 4), 0.03
STEPS, WARMUP, FEATURES = 30, 12, 16
SAMPLES = WORKERS * BATCH * WINDOW
IDEAL = sum(1 / (slow * PER_SAMPLE) for slow in SLOWNESS)
WRAPPERS = ("lightning", "accelerate", "transformers")


def main():
    parser = record.arguments(__doc__.partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    steps = WARMUP + 3 if options.quick else STEPS
    repetitions = 1 if options.quick else options.repetitions
    rates = {loop: [] for loop in LOOPS}
    for repetition in range(repetitions):
        for loop in LOOPS:
            rate = run_workers(WORKERS, _measure, (loop, steps, options.seed), record.console.print)
            rates[loop].append(rate)
            record.console.print(f"  {repetition + 1}/{repetitions} {loop}: {rate:.0f} samples/s")
    plain, torchs = rates["plain loop"], rates["PyTorch"]
    figures = [
        record.figure("plain loop, of the ideal", [rate / IDEAL for rate in plain], goal=">= 0.93"),
        record.figure(
            "plain loop, of the ideal with PyTorch's time per batch",
            [rate / _ideal(torch_rate) for rate, torch_rate in zip(plain, torchs, strict=True)],
        ),
        *(
            record.figure(f"{loop}, of the plain loop", _ratios(rates[loop], plain), goal=">= 0.97")
            for loop in WRAPPERS
        ),
        *(record.figure(f"{loop}, times PyTorch", _ratios(rates[loop], torchs)) for loop in ("plain loop", *WRAPPERS)),
    ]
    record.publish(
        "accumulation",
        f"{WORKERS} workers, speeds 1:1:1/4, batches of {BATCH}, {WINDOW} in a step",
        options,
        config={
            "workers": WORKERS,
            "batch_size": BATCH,
            "window": WINDOW,
            "slowness": SLOWNESS,
            "seconds_per_sample": PER_SAMPLE,
            "steps": steps,
            "warmup": WARMUP,
            "repetitions": repetitions,
            "scheme": "lb-bsp",
        },
        figures=figures,
        raw=rates,
    )
    return 0


def _ideal(torch_rate):
    """The ideal if a batch takes what it takes in plain PyTorch, whose steps last as long as the slow worker's."""
    own = SAMPLES / torch_rate / WINDOW - max(SLOWNESS) * BATCH * PER_SAMPLE
    return sum(BATCH / (slow * BATCH * PER_SAMPLE + own) for slow in SLOWNESS)


def _ratios(ours, theirs):
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]


def _measure(rank, argument, tell):
    """Samples per second of all workers after the warm-up."""
    loop, steps, seed = argument
    warnings.simplefilter("ignore")
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORKERS, "LOCAL_WORLD_SIZE": WORKERS}
    os.environ.update({name: str(value) for name, value in local.items()}, ACCELERATE_USE_CPU="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="none")
    torch.manual_seed(seed)
    data = TensorDataset(torch.randn(SAMPLES * steps, FEATURES), torch.randn(SAMPLES * steps, 1))
    model = Model(rank)
    model.seconds = SLOWNESS[rank] * PER_SAMPLE
    stepped = []
    register_optimizer_step_post_hook(lambda *_: stepped.append(time.perf_counter()))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        LOOPS[loop](model, data)
        os.chdir("/")
    dist.barrier()
    assert len(stepped) == steps, len(stepped)
    measured = stepped[WARMUP:]
    return SAMPLES * (len(measured) - 1) / (measured[-1] - measured[0])


def _pytorch(model, data):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model = DistributedDataParallel(model)
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, shuffle=False))
    for number, (inputs, labels) in enumerate(loader, start=1):
        with nullcontext() if number % WINDOW == 0 else model.no_sync():
            (model(inputs, labels)["loss"] / WINDOW).backward()
        if number % WINDOW == 0:
            optimizer.step()
            optimizer.zero_grad()


def _plain_loop(model, data):
    import evenstep

    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(data, batch_size=BATCH)
    model, optimizer, loader = evenstep.prepare(model, optimizer, loader, scheme="lb-bsp", accumulation=WINDOW)
    for inputs, labels in loader:
        (model(inputs, labels)["loss"] / WINDOW).backward()
        if loader.synchronises:
            optimizer.step()
            optimizer.zero_grad()


def _lightning(model, data):
    fit_lightning(model, data, True, BATCH, accumulate_grad_batches=WINDOW)


def _accelerate(model, data):
    from evenstep.integrations.accelerate import Accelerator

    accelerator = Accelerator(cpu=True, scheme="lb-bsp", gradient_accumulation_steps=WINDOW, whole_batches=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=BATCH))
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs, labels)["loss"])
            optimizer.step()
            optimizer.zero_grad()


def _transformers(model, data):
    from transformers import TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    from evenstep.integrations.transformers import EvenstepTrainer

    arguments = TrainingArguments(
        output_dir=".", use_cpu=True, num_train_epochs=1, per_device_train_batch_size=BATCH, learning_rate=0.01,
        gradient_accumulation_steps=WINDOW, optim="sgd", save_strategy="no", logging_strategy="no", report_to=[],
        disable_tqdm=True, max_grad_norm=0.0,
    )  # fmt: skip
    rows = [{"inputs": inputs, "labels": labels} for inputs, labels in data]
    trainer = EvenstepTrainer(model=model, args=arguments, train_dataset=rows, evenstep={"scheme": "lb-bsp"})
    trainer.remove_callback(PrinterCallback)
    trainer.train()


LOOPS = {
    "PyTorch": _pytorch,
    "plain loop": _plain_loop,
    "lightning": _lightning,
    "accelerate": _accelerate,
    "transformers": _transformers,
}


if __name__ == "__main__":
    sys.exit(main())
