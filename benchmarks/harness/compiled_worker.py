"""One worker of compiling.py: python compiled_worker.py KIND ITERATIONS, started by evenstep run."""

import os
import sys

import numpy as np

BATCH, FEATURES, HIDDEN, KINDS = 1024, 256, 1024, 10
RANK, COUNT = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def data(iterations):
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(BATCH * iterations, FEATURES)).astype(np.float32)
    return inputs, generator.integers(KINDS, size=len(inputs)).astype(np.int32)


def torch_(inputs, labels, compiled_before):
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import evenstep

    torch.manual_seed(0)
    wide = torch.nn.Linear(HIDDEN, HIDDEN)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, HIDDEN), torch.nn.GELU(), wide, torch.nn.GELU(), torch.nn.Linear(HIDDEN, KINDS)
    )
    model = torch.compile(model) if compiled_before else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.from_numpy(inputs), torch.from_numpy(labels).long()), BATCH // COUNT)
    model, optimizer, loader = evenstep.prepare(model, optimizer, loader)
    forward = model if compiled_before else torch.compile(model)
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(forward(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def jax_(inputs, labels):
    import jax

    import evenstep.jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(num_processes=COUNT, process_id=RANK)
    generator = np.random.default_rng(1)
    shapes = ((FEATURES, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, KINDS))
    weights = [generator.normal(size=shape, scale=0.03).astype(np.float32) for shape in shapes]

    @jax.jit
    @jax.grad
    def gradients_of(weights, x, y, mask):
        logits = jax.nn.gelu(jax.nn.gelu(x @ weights[0]) @ weights[1]) @ weights[2]
        chosen = jax.numpy.take_along_axis(logits, y[:, None], 1)[:, 0]
        return jax.numpy.mean(jax.nn.logsumexp(logits, 1) - chosen, where=mask)

    session = evenstep.jax.Session(weights=weights, data=(inputs, labels), global_batch_size=BATCH, pad=8)
    for (x, y), mask in session.epoch():
        gradients = session.mean(gradients_of(weights, x, y, mask))
        weights = [weight - 0.01 * gradient for weight, gradient in zip(weights, gradients, strict=True)]


if __name__ == "__main__":
    kind, given = sys.argv[1], data(int(sys.argv[2]))
    jax_(*given) if kind == "jax" else torch_(*given, kind == "torch-before")
