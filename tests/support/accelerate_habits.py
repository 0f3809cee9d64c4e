"""Scripts for Hugging Face Accelerate, each written once, and run with evenstep's Accelerator or with the plain one.

A habit is a function of a `Run`, of what makes the Accelerator, and of the batch size of one process; it returns
numbers to compare. Without evenstep one process trains on the global batch, with plain Accelerate (`alone`).
"""

import gc
import os
import tempfile
from dataclasses import replace
from functools import partial
from itertools import islice, takewhile

import accelerate
import torch
import torch.distributed as dist
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
    set_seed,
)
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset, WeightedRandomSampler

import evenstep
from evenstep.integrations.accelerate import Accelerator
from support import training
from support.training import model_of, weights

WORKERS = 3
BATCH = 5


def forget():
    """Accelerate keeps its state for the process."""
    AcceleratorState._reset_state()
    PartialState._reset_state()
    GradientState._reset_state()


def alone(habit, run):
    """What a habit comes to in one process, with the global batch."""
    forget()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return habit(run, partial(accelerate.Accelerator, cpu=True), WORKERS * BATCH)
    finally:
        torch.set_num_threads(threads)
        forget()


def together(habits, run, schemes):
    """What each habit comes to under each scheme, by both names; an error is text. Without options it is Accelerate."""
    as_launched()
    found = {}
    for scheme, options in schemes.items():
        make = accelerate.Accelerator if options is None else partial(Accelerator, timeout=20.0, **options)
        for habit in habits:
            found[scheme, habit.__name__] = attempt(habit, run, partial(make, cpu=True))
    return found


def as_launched():
    """The variables of a launcher, by which Accelerate knows of the other processes."""
    rank, count = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=count, LOCAL_WORLD_SIZE=count, OMP_NUM_THREADS="1")


def attempt(habit, run, make):
    forget()
    made = []

    def making(**options):
        made.append(make(**options))
        return made[-1]

    try:
        return habit(run, making, BATCH)
    except evenstep.EvenstepError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error} (of {error.__cause__ or error.__context__!r})"
    finally:
        for accelerator in made:
            accelerator.free_memory()
        gc.freeze()  # What was imported when needed: to free memory is to collect.


def loader_of(run, batch, **options):
    dataset = TensorDataset(*training.data(run))
    if not options.keys() & {"shuffle", "sampler", "batch_sampler"}:
        options["sampler"] = RandomSampler(dataset, generator=torch.Generator().manual_seed(5))
    return DataLoader(dataset, **({} if "batch_sampler" in options else {"batch_size": batch}), **options)


def parts(run, batch, **options):
    model = model_of(run)
    return model, training.optimizer_of(run, model), loader_of(run, batch, **options)


def train(accelerator, model, optimizer, loader, scheduler=None, after=lambda: None):
    model.train()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            # Plain Accelerate would also clip what has accumulated so far.
            if accelerator.sync_gradients or isinstance(accelerator, Accelerator):
                accelerator.clip_grad_norm_(model.parameters(), 2.0)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
        after()


def trained(run, accelerator, model, optimizer, loader):
    """The weights after all epochs."""
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(run.epochs):
        train(accelerator, model, optimizer, loader)
    return weights(model)


# The loop.


def ordinary(run, make, batch):
    return trained(run, make(), *parts(run, batch))


def prepare_one_by_one(run, make, batch):
    """The loader first, and its length before there is anything else."""
    accelerator = make()
    model, optimizer, loader = parts(run, batch)
    loader = accelerator.prepare(loader)
    length = len(loader)
    model = accelerator.prepare_model(model)
    optimizer = accelerator.prepare(optimizer)
    for _ in range(run.epochs):
        train(accelerator, model, optimizer, loader)
    assert isinstance(loader, DataLoader)
    assert not dist.is_initialized() or type(model) is DistributedDataParallel
    return [*weights(model), length]


def accumulate(run, make, batch):
    return trained(run, make(gradient_accumulation_steps=4), *parts(run, batch))


def whole_batches(make):
    """Makes an Accelerator whose workers have different numbers of batches in a step of 24 samples."""
    return make(gradient_accumulation_steps=4, whole_batches=True)


def accumulate_whole_batches(run, make, batch):
    """Of two samples, from one loader and then from another, with a gather where it steps."""
    together, steps = batch == BATCH, []
    accelerator, batch = (whole_batches(make), 2) if together else (make(), 24)
    model, optimizer, loader = accelerator.prepare(*parts(run, batch))
    other = accelerator.prepare(loader_of(run, batch))

    def gather():
        if accelerator.sync_gradients:
            steps.append(len(accelerator.gather(torch.zeros(1))))

    for each in (loader, loader, other):
        train(accelerator, model, optimizer, each, after=gather)
    assert steps == [WORKERS if together else 1] * 3 * -(-run.samples // 24)
    return weights(model)


def accumulate_by_hand(run, make, batch):
    accelerator = make()
    model, optimizer, loader = accelerator.prepare(*parts(run, batch))
    model.train()
    for _ in range(run.epochs):
        for number, (inputs, targets) in enumerate(loader):
            if number % 2 == 0:
                with accelerator.no_sync(model):
                    accelerator.backward(mse_loss(model(inputs), targets))
            else:
                accelerator.backward(mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
    return weights(model)


def trigger_the_synchronisation(run, make, batch):
    accelerator = make()
    model, optimizer, loader = accelerator.prepare(*parts(run, batch))
    model.train()
    for inputs, targets in loader:
        with accelerator.no_sync(model):
            loss, other = mse_loss(model(inputs), targets), mse_loss(model(-inputs), targets)
        accelerator.backward(loss)
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(other)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def schedule(run, make, batch):
    """A step of the scheduler for each step of the optimizer."""
    accelerator = make(step_scheduler_with_optimizer=False)
    model, optimizer, loader = parts(run, batch)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=100)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for _ in range(run.epochs):
        train(accelerator, model, optimizer, loader, scheduler)
    return [*weights(model), *scheduler.get_last_lr()]


def leave_the_loop(run, make, batch):
    """As with a largest number of steps; the next loop is the same epoch again, as in Accelerate."""
    set_seed(9)
    accelerator = make(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    model, optimizer, loader = accelerator.prepare(*parts(run, batch, shuffle=True))
    for steps in (2, 100):
        train(accelerator, model, optimizer, islice(loader, steps))
    return weights(model)


def train_again(run, make, batch):
    """Two trainings with one Accelerator, the second of which goes on with the model of the first."""
    accelerator = make()
    model, optimizer, loader = parts(run, batch)
    trained(run, accelerator, model, optimizer, loader)
    accelerator.free_memory()
    return trained(run, accelerator, model, training.optimizer_of(run, model), loader_of(run, batch))


def train_others_next(run, make, batch):
    """As in a cross validation: other objects, in the same Accelerator, beside the first ones."""
    accelerator = make()
    trained(run, accelerator, *parts(run, batch))
    return trained(run, accelerator, *parts(run, batch))


def two_models(run, make, batch):
    """One of which only gives targets, and is in evaluation mode."""
    accelerator = make()
    teacher, student, optimizer, loader = accelerator.prepare(model_of(run), *parts(run, batch))
    teacher.eval()
    student.train()
    for _ in range(run.epochs):
        for inputs, targets in loader:
            with torch.no_grad():
                soft = teacher(inputs)
            accelerator.backward(mse_loss(student(inputs), targets + soft))
            optimizer.step()
            optimizer.zero_grad()
    return weights(student)


def compile_the_model(run, make, batch):
    return trained(run, make(dynamo_backend="eager"), *parts(run, batch))


# The data.


def shuffle_with_a_generator(run, make, batch):
    """Which the loader draws from, too."""
    return trained(run, make(), *parts(run, batch, shuffle=True, generator=torch.Generator().manual_seed(5)))


def shuffle_by_the_seed(run, make, batch):
    set_seed(9)
    accelerator = make(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    return trained(run, accelerator, *parts(run, batch, shuffle=True))


def set_the_epoch(run, make, batch):
    set_seed(9)
    accelerator = make(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    model, optimizer, loader = accelerator.prepare(*parts(run, batch, shuffle=True))
    for epoch in (3, 7):
        loader.set_epoch(epoch)
        train(accelerator, model, optimizer, loader)
    return weights(model)


def split_the_batches(run, make, _):
    accelerator = make(dataloader_config=DataLoaderConfiguration(split_batches=True))
    return trained(run, accelerator, *parts(run, WORKERS * BATCH))


def draw_weighted(run, make, batch):
    drawn = WeightedRandomSampler(range(1, run.samples + 1), 60, generator=torch.Generator().manual_seed(5))
    return trained(run, make(), *parts(run, batch, sampler=drawn))


class Lists:
    """A batch sampler that reads the samples backwards."""

    def __init__(self, samples, batch):
        self.samples, self.batch_size, self.drop_last = samples, batch, False

    def __len__(self):
        return -(-self.samples // self.batch_size)

    def __iter__(self):
        for start in range(0, self.samples, self.batch_size):
            yield [self.samples - 1 - n for n in range(start, min(start + self.batch_size, self.samples))]


def sample_in_lists(run, make, batch):
    """A list for each process, in Accelerate."""
    accelerator = make(dataloader_config=DataLoaderConfiguration(even_batches=False))
    return trained(run, accelerator, *parts(run, batch, batch_sampler=Lists(run.samples, batch)))


def several_loaders(run, make, batch):
    accelerator = make()
    model, optimizer, loader = accelerator.prepare(*parts(run, batch))
    other = accelerator.prepare(loader_of(run, batch, shuffle=False))
    for _ in range(run.epochs):
        train(accelerator, model, optimizer, loader)
        train(accelerator, model, optimizer, other)
    return weights(model)


# Losses that the script normalises itself.


def divide_by_all(run, make, batch):
    """Windows that are fetched up front, and a loss that is divided by what all processes have in the window."""
    script = {"weights": "script"} if dist.is_initialized() else {}
    accelerator = make(gradient_accumulation_steps=3, **script)
    model = torch.nn.Sequential(torch.nn.Linear(training.FEATURES, 4)).to(run.dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    inputs, targets = training.data(run)
    labels = (10 * targets.flatten()).long() % 4
    labels[::5] = -100
    dataset = [{"inputs": x, "labels": label} for x, label in zip(inputs, labels, strict=True)]
    loader = DataLoader(dataset, batch_size=batch)
    model, optimizer, loader = accelerator.prepare(model, training.optimizer_of(run, model), loader)
    model.train()
    for _ in range(run.epochs):
        batches = iter(loader)
        for _ in range(len(loader) // 3):
            window = list(islice(batches, 3))
            count = accelerator.gather(sum((each["labels"] != -100).sum() for each in window)).sum()
            for number, each in enumerate(window):
                with accelerator.no_sync(model) if number < 2 else torch.enable_grad():
                    loss = cross_entropy(model(each["inputs"]), each["labels"], reduction="sum") / count
                    accelerator.backward(loss * 3 * accelerator.num_processes)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


# Metrics.


def gather_in_training(run, make, batch):
    """Each sample once, and rows that belong together."""
    accelerator = make()
    model, optimizer, loader = accelerator.prepare(*parts(run, batch))
    model.train()
    seen = []
    for inputs, targets in loader:
        outputs = model(inputs)
        accelerator.backward(mse_loss(outputs, targets))
        optimizer.step()
        optimizer.zero_grad()
        found = accelerator.gather_for_metrics({"outputs": outputs.detach(), "both": (inputs[:, :1], targets)})
        lengths = accelerator.gather(torch.tensor(len(inputs)))
        assert lengths.numel() == accelerator.num_processes
        names = accelerator.gather_for_metrics([str(each) for each in targets.flatten().tolist()])
        firsts, known = found["both"]
        assert sorted(names) == sorted(map(str, known.flatten().tolist()))
        if isinstance(accelerator, Accelerator):
            own = loader.epochs.shares().current.samples
            mean = accelerator.session.mean_over_workers(float(targets[:own].mean()) if own else 0.0, own)
            assert abs(mean - float(known.mean())) < 1e-12
        rows = torch.cat([firsts, found["outputs"], known], dim=1).tolist()
        seen += [value for row in sorted(rows) for value in row]
    assert len(seen) == 3 * run.samples
    return seen


def evaluate_in_between(run, make, batch):
    """Every other step, on plain equal batches, in a loop that is left before its end once."""
    accelerator = make()
    model, optimizer, loader = accelerator.prepare(*parts(run, batch))
    judged = accelerator.prepare(loader_of(run, batch, shuffle=False))
    losses = []
    model.train()
    for number, (inputs, targets) in enumerate(loader):
        accelerator.backward(mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        if number % 2:
            model.eval()
            found = []
            for few, known in judged:
                with torch.no_grad():
                    errors = (model(few) - known) ** 2
                found.append(accelerator.gather_for_metrics(errors))
                if number == 3:
                    break
            losses.append(0.0 if number == 3 else float(torch.cat(found).mean()))
            assert number == 3 or len(torch.cat(found)) == run.samples
            model.train()
    return [*weights(model), *losses]


# Checkpoints.


def resumed_from(folder, run, batch, accelerator, make, steps):
    """The weights after the rest of the epoch and one more, in new objects."""
    accelerator.free_memory()
    resumed = make()
    model, optimizer, loader = resumed.prepare(*parts(run, batch))
    resumed.load_state(folder)
    resumed.wait_for_everyone()
    train(resumed, model, optimizer, resumed.skip_first_batches(loader, steps))
    train(resumed, model, optimizer, loader)
    return weights(model)


def save_and_resume(run, make, batch, steps=4):
    """Into new objects, in the middle of an epoch, and once more at its end."""
    with tempfile.TemporaryDirectory() as mine:
        shared = [mine]
        if dist.is_initialized():
            dist.broadcast_object_list(shared)
        accelerator = make()
        model, optimizer, loader = accelerator.prepare(*parts(run, batch))
        train(accelerator, model, optimizer, loader)
        train(accelerator, model, optimizer, islice(loader, steps))
        accelerator.save_state(shared[0])
        if accelerator.is_main_process:
            names = list(accelerate.utils.load(os.path.join(shared[0], "model.safetensors")))
            assert sorted(names) == sorted(model_of(run).state_dict())
        accelerator.wait_for_everyone()
        return resumed_from(shared[0], run, batch, accelerator, make, steps)


def not_resumed(run, make, batch):
    """What `save_and_resume` must come to."""
    accelerator = make()
    model, optimizer, loader = accelerator.prepare(*parts(run, batch))
    for _ in range(3):
        train(accelerator, model, optimizer, loader)
    return weights(model)


def save_inside_the_last_step(run, make, batch):
    """Of an epoch; a script then goes on with the next epoch."""
    with tempfile.TemporaryDirectory() as mine:
        project = [mine]
        if dist.is_initialized():
            dist.broadcast_object_list(project)
        naming = partial(ProjectConfiguration, automatic_checkpoint_naming=True)
        accelerator = make(project_dir=project[0], project_config=naming())
        model, optimizer, loader = accelerator.prepare(*parts(run, batch))
        model.train()
        for number, (inputs, targets) in enumerate(loader, start=1):
            accelerator.backward(mse_loss(model(inputs), targets))
            accelerator.clip_grad_norm_(model.parameters(), 2.0)
            optimizer.step()
            optimizer.zero_grad()
            if number == len(loader):
                accelerator.save_state()
        accelerator.wait_for_everyone()
        accelerator.free_memory()
        resumed = make(project_dir=project[0], project_config=naming())
        model, optimizer, loader = resumed.prepare(*parts(run, batch))
        resumed.load_state()
        resumed.wait_for_everyone()
        for _ in range(2):
            train(resumed, model, optimizer, loader)
        return weights(model)


def resume_whole_batches(run, make, batch):
    """After two steps, for which a script has counted the batches of its own worker: the loaded state counts steps."""
    make, batch = (partial(whole_batches, make), 2) if batch == BATCH else (make, 24)
    with tempfile.TemporaryDirectory() as mine:
        shared = [mine]
        if dist.is_initialized():
            dist.broadcast_object_list(shared)
        accelerator, steps = make(), []
        model, optimizer, loader = accelerator.prepare(*parts(run, batch))
        batches = takewhile(lambda _: sum(steps) < 2, loader)
        train(accelerator, model, optimizer, batches, after=lambda: steps.append(accelerator.sync_gradients))
        accelerator.save_state(shared[0])
        accelerator.wait_for_everyone()
        return resumed_from(shared[0], run, batch, accelerator, make, len(steps))


EXACT = (
    ordinary,
    prepare_one_by_one,
    accumulate,
    accumulate_whole_batches,
    accumulate_by_hand,
    schedule,
    leave_the_loop,
    train_again,
    train_others_next,
    two_models,
    trigger_the_synchronisation,
    compile_the_model,
    shuffle_with_a_generator,
    shuffle_by_the_seed,
    set_the_epoch,
    split_the_batches,
    draw_weighted,
    sample_in_lists,
    several_loaders,
    divide_by_all,
    gather_in_training,
    evaluate_in_between,
    resume_whole_batches,
)
"""Those that come to the numbers of one process, to 1e-10."""

RESUMED = (save_and_resume, save_inside_the_last_step)
"""Those that come to the numbers of `not_resumed`."""


# As plain Accelerate with as many processes.


def schedule_as_accelerate_does(run, make, batch):
    """A step for each process, and an order from the seed of the script."""
    set_seed(9)
    accelerator = make()
    model, optimizer, loader = parts(run, batch, shuffle=True)
    scheduler = StepLR(optimizer, step_size=7, gamma=0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for _ in range(run.epochs):
        train(accelerator, model, optimizer, loader, scheduler)
    return [*weights(model), *scheduler.get_last_lr()]


def drop_the_last(run, make, batch):
    return trained(run, make(), *parts(run, batch, drop_last=True))


AS_PLAIN = (ordinary, accumulate, schedule_as_accelerate_does, drop_the_last, split_the_batches)
"""Those that come to the numbers of plain Accelerate with as many processes, where these divide the samples."""


def compress(run, make, batch):
    handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    return trained(run, make(kwargs_handlers=[handler]), *parts(run, batch))


def autocast_to_bfloat16(run, make, batch):
    run = replace(run, dtype=torch.float32)
    return trained(run, make(mixed_precision="bf16"), *parts(run, batch))


ROUNDED = {compress: 0.005, autocast_to_bfloat16: 0.02}


# Mistakes.


def train_in_evaluation_mode(run, make, batch):
    accelerator = make()
    model, optimizer, loader = accelerator.prepare(*parts(run, batch))
    model.eval()
    for inputs, targets in loader:
        accelerator.backward(mse_loss(model(inputs), targets))
        optimizer.step()


class Stream(IterableDataset):
    def __init__(self, run):
        self.rows = TensorDataset(*training.data(run))

    def __iter__(self):
        return (self.rows[n] for n in range(len(self.rows)))


def stream(run, make, batch, **options):
    accelerator = make(**options)
    model, optimizer, _ = parts(run, batch)
    train(accelerator, *accelerator.prepare(model, optimizer, DataLoader(Stream(run), batch_size=batch)))


def stream_undispatched(run, make, batch):
    stream(run, make, batch, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))


def skip_with_the_function(run, make, batch):
    accelerator = make()
    model, optimizer, loader = accelerator.prepare(*parts(run, batch))
    train(accelerator, model, optimizer, accelerate.skip_first_batches(loader, 2))


def leave_the_loader_unprepared(run, make, batch):
    accelerator = make()
    model, optimizer, loader = parts(run, batch)
    model, optimizer = accelerator.prepare(model, optimizer)
    train(accelerator, model, optimizer, loader)


def leave_the_optimizer_unprepared(run, make, batch):
    accelerator = make()
    model, optimizer, loader = parts(run, batch)
    model, loader = accelerator.prepare(model, loader)
    train(accelerator, model, optimizer, loader)


def average_by_local_sgd(run, make, batch):
    accelerator = make()
    model, optimizer, loader = accelerator.prepare(*parts(run, batch))
    model.train()
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as averages:
        for inputs, targets in loader:
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            averages.step()


def count_copies(run, make, batch):
    """In a script that normalises its loss itself, from batches without labels."""
    trained(run, make(weights="script"), *parts(run, batch))


class Counted(torch.nn.Linear):
    def forward(self, inputs, num_items_in_batch):
        return super().forward(inputs) / num_items_in_batch


def divide_and_not_say_so(run, make, batch):
    accelerator = make()
    model = Counted(training.FEATURES, 1).to(run.dtype)
    model, optimizer, loader = accelerator.prepare(model, training.optimizer_of(run, model), loader_of(run, batch))
    for inputs, _ in loader:
        accelerator.backward(model(inputs, num_items_in_batch=9).sum())
        optimizer.step()


def dispatch(run, make, batch):
    make(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))


def keep_the_state_in_the_loader(run, make, batch):
    make(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))


def shard_the_model(run, make, batch):
    make(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1))


def give_a_plugin(run, make, batch):
    make(deepspeed_plugin=object())


def step_on_ones_own(run, make, batch, scheme="local-sgd"):
    ordinary(run, lambda: Accelerator(cpu=True, scheme=scheme), batch)


def use_servers(run, make, batch):
    step_on_ones_own(run, make, batch, "ssp:bound=3")


def use_micro_batches(run, make, batch):
    step_on_ones_own(run, make, batch, "lb-bsp:micro_batch=2")


def ask_for_no_scheme(run, make, batch):
    step_on_ones_own(run, make, batch, "lb-bps")


def step_on_whole_batches(run, make, batch):
    accelerator = whole_batches(make)
    model, optimizer, loader = accelerator.prepare(*parts(run, 2))
    model.train()
    for inputs, targets in loader:
        accelerator.backward(mse_loss(model(inputs), targets))
        optimizer.step()


def gather_between_whole_batches(run, make, batch):
    accelerator = whole_batches(make)
    model, _, loader = accelerator.prepare(*parts(run, 2))
    model.train()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = mse_loss(model(inputs), targets)
            accelerator.gather(loss)


def fetch_whole_batches(run, make, batch):
    accelerator = whole_batches(make)
    model, optimizer, loader = accelerator.prepare(*parts(run, 2))
    model.train()
    batches = iter(loader)
    for inputs, targets in [next(batches), next(batches)]:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()


def accumulate_other_numbers(run, make, batch):
    accelerator = whole_batches(make)
    model, optimizer, loader = accelerator.prepare(*parts(run, 2))
    train(accelerator, model, optimizer, loader)
    accelerator.gradient_accumulation_steps = 2
    train(accelerator, model, optimizer, loader)


def drop_some_of_whole_batches(run, make, batch):
    trained(run, whole_batches(make), *parts(run, 2, drop_last=True))


def clip_by_torch(run, make, batch):
    accelerator = make(gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(*parts(run, batch))
    model.train()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            optimizer.step()
            optimizer.zero_grad()


MISTAKES_IN_EQUAL_STEPS = {
    step_on_whole_batches: "step under `with accelerator.accumulate(model):`",
    gather_between_whole_batches: "accelerator.sync_gradients",
    fetch_whole_batches: "fetches the batches of a step by itself",
    accumulate_other_numbers: "gradient_accumulation_steps is 2 now and was 4",
    drop_some_of_whole_batches: "whole_batches goes with loaders that have a batch_size and no drop_last",
}
"""Those that a worker with a single batch in the first step hears of from the others."""

MISTAKES = {
    train_in_evaluation_mode: "call model.train() before the loop",
    stream: "evenstep.ShardedDataset",
    stream_undispatched: "evenstep.ShardedDataset",
    skip_with_the_function: "use accelerator.skip_first_batches",
    leave_the_loader_unprepared: "before the prepared loader had handed out a batch",
    leave_the_optimizer_unprepared: "no optimizer was given",
    average_by_local_sgd: "no_sync",
    count_copies: "drop_last=True",
    clip_by_torch: "if accelerator.sync_gradients:",
    divide_and_not_say_so: "weights='script'",
    dispatch: "dispatch_batches=True",
    keep_the_state_in_the_loader: "use_stateful_dataloader=True",
    shard_the_model: "configured for FSDP",
    give_a_plugin: "configured for DeepSpeed",
    step_on_ones_own: "'local-sgd",
    use_servers: "'ssp'",
    use_micro_batches: "micro_batch=2'",
    ask_for_no_scheme: "lb-bsp",
}
