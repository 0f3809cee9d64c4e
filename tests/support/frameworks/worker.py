"""One worker of a framework: python -m support.frameworks.worker NAME FOLDER RANK ADDRESSES DOING"""

import os
import pickle
import signal
import sys
import traceback
import warnings
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import evenstep
from support.frameworks.start import leave
from support.frameworks.task import EPOCHS, GLOBAL, LENGTH, MOMENTUM, RATE, WORKERS, data, first_weights


def main(name, folder, rank, addresses, doing):
    """Do the jobs of the folder one after the other, and leave what they came to there."""
    jobs = pickle.loads((Path(folder) / "jobs").read_bytes())
    results = {}
    try:
        adapter = import_module(f"support.frameworks.of_{name}")
        adapter.join(rank, addresses)
        if any(job.kind is not None for job in jobs.values()):
            adapter = import_module(f"support.frameworks.kinds_{name}")
        for title, job in jobs.items():
            results[title] = done(adapter, job, rank)
        if rank == 0:
            results |= {
                ("alone", job.kind or job.dtype, job.faulty): adapter.alone(job)
                for job in jobs.values()
                if job.killed is None and job.odd is None
            }
    except Exception as error:
        traceback.print_exc()
        results["error"] = f"{type(error).__name__}: {error}"
    leave(Path(folder) / f"result.{rank}", results, doing)


def done(adapter, job, rank):
    """The indices and sizes of each iteration, and the weights in the end."""
    job = job if rank == 1 else replace(job, odd=None, faulty=False)
    iterations = adapter.train(job) if job.servers is None else served(adapter, job, rank)
    try:
        with warnings.catch_warnings(record=True) as warned:
            *taken, weights = killed_in_time(iterations, job, rank)
    except evenstep.DisagreementError as error:
        return {"refused": str(error)}
    return {
        "taken": [([int(each) for each in indices], list(map(int, sizes))) for indices, sizes in taken],
        "weights": weights,
        "warned": [said for each in warned if (said := str(each.message)).startswith("worker ")],
    }


def served(adapter, job, rank):
    """A loop around `evenstep.Client`, with the gradients of the framework."""
    inputs, labels = data(job.dtype)
    gradients, (addresses, secret) = adapter.gradients(job), job.servers
    client = evenstep.Client(
        job.scheme,
        rank=rank,
        workers=WORKERS,
        weights=first_weights(job.dtype),
        options={"lr": RATE, "momentum": MOMENTUM},
        length=LENGTH,
        global_batch_size=GLOBAL,
        shuffle=False,
        servers=addresses,
        secret=secret,
    )
    for epoch in range(EPOCHS):
        for share in client.epoch(epoch):
            client.push(gradients(client.weights, inputs[share.indices], labels[share.indices]))
            yield share.indices[: share.samples], share.sizes
    weights = [each.copy() for each in client.weights]
    client.close()
    yield weights


def killed_in_time(iterations, job, rank):
    for number, each in enumerate(iterations, start=1):
        yield each
        if number == job.killed and rank == WORKERS - 1:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4].split(","), int(sys.argv[5]))
