"""Trains under Ray Train on a local Ray, in several runs; prints what each ended with, as one line of JSON."""

import json
import os
import signal
import sys
from pathlib import Path

import ray
import ray.data
import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from evenstep.integrations.ray import EvenstepConfig

FEATURES, SAMPLES, BATCH, EPOCHS = 5, 90, 5, 2


def task():
    """A model and data that every worker makes alike."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randn(SAMPLES, n, generator=generator, dtype=torch.float64) for n in (FEATURES, 1))
    torch.manual_seed(2)
    return torch.nn.Linear(FEATURES, 1, dtype=torch.float64), torch.utils.data.TensorDataset(inputs, targets)


def loop(config):
    """A user's script."""
    import evenstep  # In the worker's process.

    model, data = task()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH)
    refused = []
    if config["scheme"] is None:
        rows = ray.data.range(8).iterator().iter_torch_batches(batch_size=2)
        for wrong in (rows, ray.train.torch.prepare_data_loader(loader)):
            try:
                evenstep.prepare(model, optimizer, wrong)
            except evenstep.ConfigError as error:
                refused.append(str(error))
    scheme = scripted() if config["scheme"] is None else None
    model, optimizer, loader = evenstep.prepare(model, optimizer, loader, scheme=scheme)
    done, mark = 0, Path(config["folder"], "killed")
    for epoch in range(EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            done += 1
            if done == 4 and ray.train.get_context().get_world_rank() == 1 and not mark.exists():
                mark.touch()  # The next process of this rank trains on.
                os.kill(os.getpid(), signal.SIGKILL)
        weights = [value for parameter in model.parameters() for value in parameter.flatten().tolist()]
        ray.train.report({"epoch": epoch})
    said = {"epoch": epoch, "weights": weights, "sizes": loader.current.sizes.tolist(), "refused": refused}
    loader.close()
    Path(config["folder"], f"said-{ray.train.get_context().get_world_rank()}").write_text(json.dumps(said))


def scripted():
    """Sizes that change in every iteration."""
    import evenstep
    from evenstep.testing.scripted import Scripted

    return evenstep.Scheme(name="scripted", load=Scripted(seed=3))


def fit(parent, name, scheme):
    """What each worker of a run ended with, in which one was killed once. Without a scheme, sizes change."""
    folder = parent / name
    folder.mkdir()
    result = TorchTrainer(
        loop,
        train_loop_config={"folder": str(folder), "scheme": scheme},
        torch_config=EvenstepConfig(scheme=scheme, run_dir=str(folder / "run"), wait_seconds=60),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="ray", storage_path=str(folder), failure_config=FailureConfig(max_failures=1)),
    ).fit()
    said = [json.loads(path.read_text()) for path in sorted(folder.glob("said-*"))]
    return {"said": said, "error": result.error and str(result.error), "fired": (folder / "killed").exists()}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    # Without an environment of their own, workers are processes that Ray has started before.
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    runs = {"barrier": fit(folder, "barrier", None), "servers": fit(folder, "servers", "ssp:bound=1")}
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    runs["summaries"] = [
        line for log in logs.glob("*.err") for line in log.read_text().splitlines() if " trained " in line
    ]
    ray.shutdown()
    print(json.dumps(runs))
