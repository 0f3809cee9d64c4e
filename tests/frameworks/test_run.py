"""`evenstep run --framework`, from an environment with PyTorch, with workers in the framework's own."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.frameworks.servers import torch_python
from support.frameworks.table import require
from support.guard import GUARD_SECONDS
from support.of_tensorflow import QUIET

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.multiprocess


def run(folder, framework, script, workers, *options, arguments=()):
    """The process of `evenstep run`, which has ended."""
    require(framework)
    (folder / "train.py").write_text(script)
    options = ["--workers", str(workers), *options, "--framework", framework, "--no-python", sys.executable]
    return subprocess.run(
        [torch_python(), "-m", "evenstep", "run", *options, "train.py", *arguments],
        cwd=folder,
        env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=GUARD_SECONDS,
        check=False,
    )


@pytest.mark.parametrize("framework", ["tensorflow", "mxnet", "jax"])
def test_the_script_of_the_page_gives_the_slow_worker_less(framework, tmp_path):
    page = (ROOT / f"docs/frameworks/{framework}.md").read_text()
    script = page.partition("```python\n")[2].partition("```")[0]
    ended = run(tmp_path, framework, script, 2, "--slow", "1=4x")
    assert ended.returncode == 0, ended.stderr
    told = re.search(r"batch sizes (\d+) (\d+) at first, (\d+) (\d+) at the end", ended.stderr)
    first, second, more, less = map(int, told.groups())
    assert less < second  # By how much depends on what else the machine does.
    assert first + second == more + less
    # JAX compiles for its first sizes, which it has for one iteration: too little to tell how long they take.
    assert framework == "jax" or "times as fast as with equal sizes" in ended.stderr


ENDS_AT_ONCE = """
import os

import mxnet as mx
from mxnet import autograd, gluon

import evenstep.mxnet

net = gluon.nn.Dense(2, in_units=20)
net.initialize()
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore="dist_sync")
loader = gluon.data.DataLoader(gluon.data.ArrayDataset(mx.nd.ones((64, 20))), 4)
trainer, loader = evenstep.mxnet.prepare(trainer, loader)
for x in loader:
    with autograd.record():
        loss = net(x).sum()
    loss.backward()
    if os.environ["RANK"] == "3":  # What MXNet computes first, so that the sum has not begun when the script ends.
        square = mx.nd.ones((1500, 1500))
        squares = [mx.nd.dot(square, square) for _ in range(8)]
    trainer.step(len(x))
"""


def test_a_script_of_mxnet_may_end_with_its_last_step(tmp_path):
    """A process of MXNet that ends leaves out what it has not begun, such as its part of the last sum."""
    ended = run(tmp_path, "mxnet", ENDS_AT_ONCE, 4)
    assert ended.returncode == 0, ended.stderr


NORMALISES = """
import sys

import mxnet as mx
from mxnet import autograd, gluon

import evenstep.mxnet

net = gluon.nn.Sequential()
net.add(gluon.nn.BatchNorm(in_channels=20), gluon.nn.Dense(2, in_units=20))
net.initialize()
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore="dist_sync")
loader = gluon.data.DataLoader(gluon.data.ArrayDataset(mx.nd.arange(1280).reshape((64, 20))), 4)
trainer, loader = evenstep.mxnet.prepare(trainer, loader)
for x in loader:
    with autograd.record():
        loss = net(x).sum(axis=1)
    loss.backward()
    trainer.step(len(x))
sys.stdout.write(f"{net[0].running_mean.data().mean().asscalar()}\\n")  # At once, and not beside the other's.
"""


def test_each_worker_of_mxnet_has_statistics_of_its_own_in_batch_normalisation(tmp_path):
    ended = run(tmp_path, "mxnet", NORMALISES, 2)
    assert ended.returncode == 0, ended.stderr
    assert len(set(ended.stdout.split())) == 2


FETCHES = """
import multiprocessing
import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import evenstep.mxnet
from evenstep.schemes import Scheme
from evenstep.testing.scripted import Scripted

LENGTH, threads = 64, sys.argv[1] == "threads"
fetched = multiprocessing.Value("q", 0)  # The highest index, in the order of the data.


class Rows(gluon.data.Dataset):
    def __len__(self):
        return LENGTH

    def __getitem__(self, at):
        with fetched.get_lock():
            fetched.value = max(fetched.value, at)
        return np.full(2, at, "float32")


loaders = [gluon.data.DataLoader(Rows(), 4, num_workers=2, thread_pool=threads) for _ in range(2)]
for scheme, loader in zip(("bsp", Scheme(name="scripted", load=Scripted(seed=11))), loaders):
    net = gluon.nn.Dense(1, in_units=2)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore="dist_sync")
    trainer, loader = evenstep.mxnet.prepare(trainer, loader, scheme, partition="common")
    fetched.value = 0
    for x in loader:
        now = loader.current
        assert x[:, 0].asnumpy().tolist() == now.indices.tolist()
        last = now.iteration == len(loader) - 1
        while scheme == "bsp" and not last and fetched.value <= now.indices.max():
            pass  # Until a row of the next batch is fetched.
        with autograd.record():
            loss = net(x).sum()
        loss.backward()
        trainer.step(len(x))
    loader.close()
"""


@pytest.mark.parametrize("how", ["processes", "threads"])
def test_the_workers_of_mxnets_loader_fetch_the_next_batch_while_this_one_is_computed_on(how, tmp_path):
    ended = run(tmp_path, "mxnet", FETCHES, 2, arguments=[how])
    assert ended.returncode == 0, ended.stderr


MEAN_OF_ONE_SAMPLE = """
import os
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import evenstep.mxnet
from evenstep.schemes import static

net = gluon.nn.Dense(1, in_units=2, use_bias=False)
net.initialize(mx.init.Constant(int(os.environ["RANK"])))
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore="dist_sync")
inputs = np.arange(16, dtype="float32").reshape(8, 2) / 16
loader = gluon.data.DataLoader(gluon.data.ArrayDataset(inputs), 4)
trainer, loader = evenstep.mxnet.prepare(trainer, loader, static([7, 1]))
for x in loader:
    with autograd.record():
        loss = net(x).mean()
    loss.backward()
    trainer.step(1)
assert loader.current.samples == [7, 1][int(os.environ["RANK"])]
weights = net.weight.data().asnumpy()
assert np.abs(weights + 0.1 * inputs.mean(0)).max() < 1e-6, weights
"""


def test_first_weights_are_those_of_worker_0_and_the_mean_loss_of_one_sample_counts_as_a_mean(tmp_path):
    """With one sample step(1) is also what a loss that is summed is given."""
    ended = run(tmp_path, "mxnet", MEAN_OF_ONE_SAMPLE, 2)
    assert ended.returncode == 0, ended.stderr


SHARDED = """
import os

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import evenstep
import evenstep.mxnet


def prepared(rows, **given):
    net = gluon.nn.Dense(1, in_units=2)
    net.initialize(mx.init.Zero())
    trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore="dist_sync")
    return evenstep.mxnet.prepare(trainer, gluon.data.DataLoader(gluon.data.ArrayDataset(rows), 4), "bsp", **given)


rows = np.random.default_rng(0).normal(size=(40, 2)).astype("float32")
shard = rows[int(os.environ["RANK"])::2]
prepared(shard, partition="common")
try:
    prepared(shard)
except evenstep.DisagreementError as error:
    assert str(error).startswith("worker 1 has other samples than worker 0"), error
else:
    raise AssertionError("each worker has a shard of its own")
trainer, loader = prepared(rows)
assert len(loader) == 5
for part in (trainer.allreduce_grads, lambda: trainer.update(4)):
    try:
        part()
    except evenstep.ConfigError as error:
        assert str(error).startswith("the gradients of all workers are summed in step alone"), error
    else:
        raise AssertionError("a step on the gradient of this worker alone")
batches = iter(loader)
next(batches)
try:
    next(batches)
except evenstep.ConfigError as error:
    assert str(error).startswith("a batch was asked for before the step on the last one: call trainer.step"), error
else:
    raise AssertionError("a batch without a step")
batches.close()
trainer, loader = prepared(rows)
net = gluon.nn.Dense(1, in_units=2)
net.initialize()
other = gluon.Trainer(net.collect_params(), "sgd")
try:
    for x in loader:
        other.step(1)
except evenstep.ConfigError as error:
    assert str(error).startswith("a trainer that was not prepared steps in the loop"), error
else:
    raise AssertionError("a step of a second trainer on the gradient of this worker alone")
try:
    for epoch in range(3):
        for x in loader:
            with autograd.record():
                loss = sum((each.data() * x.mean()).sum() for each in trainer._params)
            loss.backward()
            trainer.set_learning_rate(0.1 * (1 + int(os.environ["RANK"])))
            trainer.step(1)
except evenstep.DisagreementError as error:
    assert "has other weights in dense" in str(error), error
else:
    raise AssertionError("each worker has weights of its own")
"""


def test_shards_and_steps_of_one_worker_alone_are_refused_by_mxnet(tmp_path):
    ended = run(tmp_path, "mxnet", SHARDED, 2)
    assert ended.returncode == 0, ended.stderr


DIES_IN_A_SUM = """
import os
import signal

import mxnet as mx
from mxnet import autograd, gluon

import evenstep.mxnet
from evenstep.mxnet.workers import StoreWorkers

net = gluon.nn.Dense(2, in_units=20)
net.initialize()
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore="dist_sync")
loader = gluon.data.DataLoader(gluon.data.ArrayDataset(mx.nd.ones((64, 20))), 4)
trainer, loader = evenstep.mxnet.prepare(trainer, loader)
add_up = StoreWorkers.sum


def sum_or_die(workers, vector):
    if os.environ["RANK"] == "2" and loader.current.iteration == 1:
        print("worker 2 dies", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return add_up(workers, vector)


StoreWorkers.sum = sum_or_die
for x in loader:
    with autograd.record():
        loss = net(x).sum()
    loss.backward()
    trainer.step(len(x))
"""


def test_workers_of_mxnet_that_wait_for_a_dead_one_are_stopped(tmp_path):
    """MXNet's sum has no timeout: the launcher names the worker and ends the others."""
    ended = run(tmp_path, "mxnet", DIES_IN_A_SUM, 3)
    assert "worker 2 dies" in ended.stdout
    assert ended.returncode == 128 + signal.SIGKILL
    assert "evenstep: worker 2 was killed by SIGKILL" in ended.stderr
