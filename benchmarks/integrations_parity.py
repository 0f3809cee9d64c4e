"""Whether each wrapper ends with its own weights: Lightning, Fabric, Accelerate, Transformers and Ray Train.

Three workers under lb-bsp, the last one four times slower: the model sleeps for every sample that it computes on. The
weights after two epochs, the last batch of which is too short for all, are compared with those of the plain wrapper in
one process with the same global batch. Everything is computed in float64.
"""

import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from harness import record
from harness.workers import run_workers
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Sampler, TensorDataset

from evenstep.core.samples import Ledger

WORKERS, BATCH, SLOWNESS, PER_SAMPLE = 3, 9, (1, 1, 4), 0.01
ITERATIONS, EPOCHS, FEATURES, WINDOW = 17, 2, 16, 3
SAMPLES = WORKERS * BATCH * ITERATIONS + 2
LEFT_AFTER = 4  # batches of the second epoch, in the habit that continues
LIMIT = "<= 1e-10"
HABITS = {
    "the loop": {},
    "accumulation over 3 batches": {"accumulate": WINDOW},
    "clipping by norm": {"clip": 0.1},
    "a step of a schedule for each batch": {"schedule": True},
    "a sampler of the script's own": {"shuffle": True},
    "a frozen layer": {"freeze": True},
    "continued within an epoch": {"resume": True},
}


class Model(torch.nn.Module):
    """A small network on an emulated device, with an output as Transformers asks for it."""

    def __init__(self, seconds, freeze=False):
        super().__init__()
        torch.manual_seed(1)
        layers = torch.nn.Linear(FEATURES, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.Linear(32, 1)
        self.layers, self.seconds = torch.nn.Sequential(*layers).double(), seconds
        self.layers[2].requires_grad_(not freeze)
        self.sizes = []

    def forward(self, inputs, labels):
        self.sizes.append(len(inputs))
        time.sleep(self.seconds * len(inputs))
        return {"loss": mse_loss(self.layers(inputs), labels)}

    @property
    def weights(self):
        return [value for parameter in self.parameters() for value in parameter.flatten().tolist()]


class Backwards(Sampler):
    """A sampler that somebody wrote."""

    def __iter__(self):
        return iter(range(SAMPLES - 1, -1, -1))

    def __len__(self):
        return SAMPLES


class Run:
    """One habit: with evenstep on a worker, or plainly (`rank` is None) in one process with the global batch."""

    def __init__(self, rank, folder, habit, *, shrinks=False):
        self.even, self.folder, self.shrinks = rank is not None, folder, shrinks and rank is None
        self.batch = BATCH if self.even else WORKERS * BATCH
        self.seconds = SLOWNESS[rank] * PER_SAMPLE if self.even else 0.0
        asked = HABITS[habit]
        self.accumulate, self.clip = asked.get("accumulate", 1), asked.get("clip")
        self.schedule, self.shuffle, self.freeze = (name in asked for name in ("schedule", "shuffle", "freeze"))
        self.resume = self.even and "resume" in asked
        self.saved = str(Path(folder, "saved"))

    @property
    def data(self):
        draw = torch.Generator().manual_seed(2)
        inputs = torch.randn(SAMPLES, FEATURES, generator=draw, dtype=torch.float64)
        return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))

    @property
    def loader(self):
        if self.shrinks:
            return DataLoader(self.data, batch_sampler=list(self.shrunken_batches()))
        return DataLoader(self.data, batch_size=self.batch, sampler=Backwards() if self.shuffle else None)

    def shrunken_batches(self):
        """The global batches of evenstep in Lightning, whose last two share their samples (`empty="shrink"`)."""
        order, ledger = (
            list(Backwards() if self.shuffle else range(SAMPLES)),
            Ledger(length=SAMPLES, global_batch_size=self.batch, even=True),
        )
        while (part := ledger.slice(ledger.iteration)) is not None:
            ledger.iteration += 1
            yield order[part.start : part.stop]

    @property
    def model(self):
        return Model(self.seconds, self.freeze)

    def optimizer(self, model):
        return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.05, momentum=0.9)

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5 if self.schedule else 1.0)

    def steps_after(self, number):
        """Whether the optimizer steps after this batch of an epoch."""
        return (number + 1) % self.accumulate == 0


def by_hand(run):
    """A plain loop, with `evenstep.prepare`."""
    import evenstep

    def prepared():
        model, loader = run.model, run.loader
        optimizer = run.optimizer(model)
        scheduler = run.scheduler(optimizer)
        wrapped = model
        if run.even:
            wrapped, optimizer, loader = evenstep.prepare(model, optimizer, loader)
        return model, wrapped, optimizer, scheduler, loader

    def train(wrapped, optimizer, scheduler, loader, batches=None):
        for number, (inputs, labels) in enumerate(loader):
            (wrapped(inputs, labels)["loss"] / run.accumulate).backward()
            if run.steps_after(number):
                if run.clip:
                    torch.nn.utils.clip_grad_norm_(wrapped.parameters(), run.clip)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            if number + 1 == batches:
                return

    model, *parts = prepared()
    train(*parts)
    if not run.resume:
        train(*parts)
        return model
    train(*parts, batches=LEFT_AFTER)
    state = [part.state_dict() for part in (model, *parts[1:])]
    model, *parts = prepared()
    for part, saved in zip((model, *parts[1:]), state, strict=True):
        part.load_state_dict(saved)
    train(*parts)
    return model


def with_lightning(run):
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from evenstep.integrations.lightning import EvenstepStrategy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = run.model

        def training_step(self, batch, index):
            return self.model(*batch)["loss"]

        def configure_optimizers(self):
            optimizer = run.optimizer(self.model)
            return [optimizer], [{"scheduler": run.scheduler(optimizer), "interval": "step"}]

    def fit(resume=None, **options):
        where = {"strategy": EvenstepStrategy("lb-bsp"), "devices": WORKERS} if run.even else {"devices": 1}
        trainer = lightning.Trainer(
            **where, accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_checkpointing="callbacks" in options, enable_model_summary=False, max_epochs=EPOCHS,
            accumulate_grad_batches=run.accumulate, gradient_clip_val=run.clip, **options,
        )  # fmt: skip
        module = Module()
        trainer.fit(module, run.loader, ckpt_path=resume)
        return module

    if not run.resume:
        return fit().model
    done = ITERATIONS + 1 + LEFT_AFTER
    fit(callbacks=[ModelCheckpoint(run.saved, "{step}", every_n_train_steps=done, save_top_k=-1)])
    return fit(resume=f"{run.saved}/step={done}.ckpt").model


def with_fabric(run):
    import lightning

    from evenstep.integrations.lightning import EvenstepFabricStrategy

    where = {"strategy": EvenstepFabricStrategy("lb-bsp"), "devices": WORKERS} if run.even else {"devices": 1}
    fabric = lightning.Fabric(accelerator="cpu", **where)
    fabric.launch()

    def set_up():
        inner = run.model
        optimizer = run.optimizer(inner)
        scheduler = run.scheduler(optimizer)
        model, optimizer = fabric.setup(inner, optimizer)
        return (
            inner,
            scheduler,
            {"model": model, "optimizer": optimizer, "loader": fabric.setup_dataloaders(run.loader)},
        )

    def train(scheduler, model, optimizer, loader, batches=None):
        for number, (inputs, labels) in enumerate(loader):
            with fabric.no_backward_sync(model, enabled=run.even and not run.steps_after(number)):
                fabric.backward(model(inputs, labels)["loss"] / run.accumulate)
            if run.steps_after(number):
                if run.clip:
                    fabric.clip_gradients(model, optimizer, max_norm=run.clip)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            if number + 1 == batches:
                return

    inner, scheduler, parts = set_up()
    train(scheduler, **parts)
    if run.resume:
        train(scheduler, **parts, batches=LEFT_AFTER)
        fabric.save(run.saved, parts)
        fabric.strategy.session.close()
        inner, scheduler, parts = set_up()
        fabric.load(run.saved, parts)
    train(scheduler, **parts)
    if run.even:
        fabric.strategy.session.close()
    return inner


def with_accelerate(run):
    import accelerate
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from evenstep.integrations.accelerate import Accelerator

    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()  # One process runs all habits.
    options = {"scheme": "lb-bsp"} if run.even else {}
    make = Accelerator if run.even else accelerate.Accelerator

    def prepared():
        accelerator = make(
            cpu=True, gradient_accumulation_steps=run.accumulate, step_scheduler_with_optimizer=False, **options
        )
        inner = run.model
        optimizer = run.optimizer(inner)
        parts = accelerator.prepare(inner, optimizer, run.scheduler(optimizer), run.loader)
        return accelerator, inner, parts

    def train(accelerator, model, optimizer, scheduler, loader, batches=None):
        for number, (inputs, labels) in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs, labels)["loss"])
                if run.clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), run.clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if number + 1 == batches:
                return

    accelerator, inner, parts = prepared()
    train(accelerator, *parts)
    if run.resume:
        train(accelerator, *parts, batches=LEFT_AFTER)
        accelerator.save_state(run.saved)
        accelerator.wait_for_everyone()
        accelerator.free_memory()
        accelerator, inner, parts = prepared()
        accelerator.load_state(run.saved)
        train(accelerator, *parts[:-1], accelerator.skip_first_batches(parts[-1], LEFT_AFTER))
    else:
        train(accelerator, *parts)
    accelerator.free_memory()
    return inner


def with_transformers(run):
    import transformers
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from evenstep.integrations.transformers import EvenstepTrainer

    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()

    class Trainer(EvenstepTrainer if run.even else transformers.Trainer):
        def _get_train_sampler(self, dataset=None):
            return Backwards() if run.shuffle else torch.utils.data.SequentialSampler(self.train_dataset)

    def trainer(**options):
        arguments = transformers.TrainingArguments(
            output_dir=run.saved, use_cpu=True, num_train_epochs=EPOCHS, per_device_train_batch_size=run.batch,
            gradient_accumulation_steps=run.accumulate, max_grad_norm=run.clip or 0.0,
            logging_strategy="no", report_to=[], disable_tqdm=True, **{"save_strategy": "no", **options},
        )  # fmt: skip
        model = run.model
        optimizer = run.optimizer(model)
        rows = [{"inputs": inputs, "labels": labels} for inputs, labels in run.data]
        made = Trainer(
            model=model, args=arguments, train_dataset=rows, optimizers=(optimizer, run.scheduler(optimizer)),
            **({"evenstep": {"scheme": "lb-bsp"}} if run.even else {}),
        )  # fmt: skip
        made.remove_callback(transformers.PrinterCallback)
        return made, model

    done = ITERATIONS + 1 + LEFT_AFTER
    if run.resume:
        trainer(save_strategy="steps", save_steps=done)[0].train()
    last, model = trainer()
    last.train(resume_from_checkpoint=f"{run.saved}/checkpoint-{done}" if run.resume else None)
    return model


IN_WORKERS = {
    "Lightning": with_lightning,
    "Fabric": with_fabric,
    "Accelerate": with_accelerate,
    "Transformers": with_transformers,
}
ALL = {**IN_WORKERS, "Ray Train": by_hand}


def main():
    parser = record.arguments(__doc__.partition("\n")[0])
    parser.add_argument("--wrappers", nargs="+", choices=list(ALL), default=list(ALL))
    options = parser.parse_args()
    habits, wrappers = list(HABITS)[: 2 if options.quick else None], options.wrappers
    found = {}
    for wrapper in wrappers:
        if wrapper in IN_WORKERS:
            found[wrapper] = run_workers(WORKERS, _every, (wrapper, habits), record.console.print)
        else:
            found[wrapper] = _on_ray(habits)
    plain = {wrapper: _plainly(wrapper, habits) for wrapper in wrappers}
    differences = {
        wrapper: {habit: _difference(plain[wrapper][habit], found[wrapper][habit]["weights"]) for habit in habits}
        for wrapper in wrappers
    }
    figures = [
        record.figure(f"{wrapper}: largest difference of a weight", list(differences[wrapper].values()), goal=LIMIT)
        for wrapper in wrappers
    ]
    for each in figures:  # The worst counts, not the median.
        each["met"] = each["largest"] <= float(LIMIT.split()[1])
    shown = [[habit, *(f"{differences[wrapper][habit]:.1e}" for wrapper in wrappers)] for habit in habits]
    sizes = [[habit, *(":".join(map(str, found[wrapper][habit]["sizes"])) for wrapper in wrappers)] for habit in habits]
    met = record.publish(
        "integrations_parity",
        "Weights in five wrappers, compared with the plain wrapper's",
        options,
        config={
            "workers": WORKERS,
            "batch_size": BATCH,
            "slowness": SLOWNESS,
            "seconds_per_sample": PER_SAMPLE,
            "samples": SAMPLES,
            "epochs": EPOCHS,
            "scheme": "lb-bsp",
            "versions": _versions(),
        },
        figures=figures,
        raw={
            "differences": differences,
            "sizes": {name: {h: found[name][h]["sizes"] for h in habits} for name in wrappers},
        },
        tables=[
            record.table("Largest difference of a weight from the plain wrapper's", ["habit", *wrappers], shown),
            record.table("Batch sizes three iterations before the last, speeds 1:1:1/4", ["habit", *wrappers], sizes),
        ],
    )
    return 0 if met else 1


def _difference(ones, others):
    return max(abs(one - other) for weights in others for one, other in zip(ones, weights, strict=True))


def _versions():
    from importlib.metadata import version

    return {name: version(name) for name in ("lightning", "accelerate", "transformers", "ray")}


def _plainly(wrapper, habits):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    shrinks = wrapper in ("Lightning", "Fabric")
    with tempfile.TemporaryDirectory() as folder:
        return {habit: ALL[wrapper](Run(None, folder, habit, shrinks=shrinks)).weights for habit in habits}


def _every(rank, argument, tell):
    """The weights of all workers after each habit, and their sizes."""
    wrapper, habits = argument
    warnings.simplefilter("ignore")
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORKERS, "LOCAL_WORLD_SIZE": WORKERS, "GROUP_RANK": 0}
    os.environ.update({name: str(value) for name, value in local.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="none", ACCELERATE_USE_CPU="1")
    found = {}
    for habit in habits:
        with tempfile.TemporaryDirectory() as folder:
            shared = [folder]
            dist.broadcast_object_list(shared)
            model = ALL[wrapper](Run(rank, shared[0], habit))
            found[habit] = _of_all(model)
            tell(f"  {wrapper}, {habit}: {found[habit]['sizes']}")
            dist.barrier()
    return found


def _of_all(model):
    each = [None] * WORKERS
    dist.all_gather_object(each, (model.weights, model.sizes[-4]))
    return {"weights": [weights for weights, _ in each], "sizes": [size for _, size in each]}


def _on_ray(habits):
    """The same in `train_loop_per_worker`."""
    os.environ.update(RAY_ENABLE_UV_RUN_RUNTIME_ENV="0", RAY_USAGE_STATS_ENABLED="0")
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from evenstep.integrations.ray import EvenstepConfig

    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=WORKERS + 1, include_dashboard=False, runtime_env={"env_vars": path}, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            _loop,
            train_loop_config={"folder": folder, "habits": habits},
            torch_config=EvenstepConfig(scheme="lb-bsp"),
            scaling_config=ScalingConfig(num_workers=WORKERS),
            run_config=RunConfig(name="ray", storage_path=folder),
        ).fit()
        ray.shutdown()
        return json.loads(Path(folder, "found.json").read_text())


def _loop(config):
    import integrations_parity as here
    import ray.train

    rank, found = ray.train.get_context().get_world_rank(), {}
    for habit in config["habits"]:
        found[habit] = here._of_all(here.by_hand(here.Run(rank, config["folder"], habit)))
    if rank == 0:
        Path(config["folder"], "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
