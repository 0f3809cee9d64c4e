"""Two processes without torch train on shares that follow their speeds: python examples/numpy_balancer.py

Worker 1 does every computation four times, as if it were four times slower.
"""

import argparse
import multiprocessing
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # Before NumPy: the workers share this machine's cores.
import numpy as np

import evenstep

WORKERS = 2


def main():
    """Start the workers, and pass their rows between them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scheme", default="lb-bsp")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--run-dir", help="for evenstep report and evenstep top")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(WORKERS)]
    workers = [
        context.Process(target=work, args=(rank, theirs, options), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for worker, (_, theirs) in zip(workers, pipes, strict=True):
        worker.start()
        theirs.close()
    try:
        while True:
            rows = [ours.recv_bytes() for ours, _ in pipes]
            for ours, _ in pipes:
                ours.send(rows)
    except EOFError:  # The workers have finished, or one has failed.
        pass
    for ours, _ in pipes:
        ours.close()
    for worker in workers:
        worker.join()
    sys.exit(max(abs(worker.exitcode) for worker in workers))


def work(rank, pipe, options):
    """One worker: a small network in NumPy, on this worker's share of each batch."""

    def all_gather(row):
        pipe.send_bytes(row)
        return pipe.recv()

    def summed(gradient):
        return sum(np.frombuffer(each) for each in all_gather(gradient.tobytes())).reshape(gradient.shape)

    generator = np.random.default_rng(0)
    kinds = generator.integers(10, size=40_000)
    inputs, labels = generator.normal(size=(10, 64))[kinds] + 2 * generator.normal(size=(40_000, 64)), np.eye(10)[kinds]
    weights = [generator.normal(size=shape) / shape[0] ** 0.5 for shape in [(64, 512), (512, 10)]]

    balancer = evenstep.Balancer(
        options.scheme,
        rank=rank,
        workers=WORKERS,
        all_gather=all_gather,
        length=len(inputs),
        global_batch_size=3000,
        run_dir=options.run_dir,
    )
    for epoch in range(options.epochs):
        for share in balancer.epoch(epoch):
            with balancer.compute():
                for _ in range(4 if rank == 1 else 1):
                    loss, gradients = backpropagation(weights, inputs[share.indices], labels[share.indices])
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= 0.5 * summed(gradient * share.weight)
            balancer.note(loss=loss)
        if rank == 0:
            loss, _ = backpropagation(weights, inputs, labels)
            print(f"epoch {epoch + 1}: loss {loss:.3f}, batch sizes {balancer.sizes}", flush=True)


def backpropagation(weights, inputs, labels):
    """The mean cross entropy, and its gradients."""
    hidden = np.tanh(inputs @ weights[0])
    logits = hidden @ weights[1]
    chances = np.exp(logits - logits.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    wrong = (chances - labels) / len(labels)
    loss = float(-np.log((chances * labels).sum(1)).mean())
    return loss, [inputs.T @ ((wrong @ weights[1].T) * (1 - hidden**2)), hidden.T @ wrong]


if __name__ == "__main__":
    main()
