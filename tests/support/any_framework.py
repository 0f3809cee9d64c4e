"""Workers that never import torch: logistic regression in NumPy, over pipes between their processes."""

import multiprocessing
import multiprocessing.connection
import os
import sys
import traceback
from unittest import mock

import numpy as np

from support.guard import GUARD_SECONDS

WORKERS, SEED, LENGTH, GLOBAL, EPOCHS = 3, 5, 200, 48, 3
CONTEXT = multiprocessing.get_context("spawn")


def digits():
    """Some of scikit-learn's handwritten digits."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return found.data[:LENGTH] / 16, found.target[:LENGTH]


def run(jobs):
    """The values of the jobs on each worker, as `(function, arguments)` by name; an error is a text."""
    ends = {rank: {} for rank in range(WORKERS)}
    for one in range(WORKERS):
        for other in range(one):
            ends[one][other], ends[other][one] = CONTEXT.Pipe()
    data = digits()
    processes, results = [], []
    for rank in range(WORKERS):
        result, remote = CONTEXT.Pipe()
        processes.append(CONTEXT.Process(target=_worker, args=(rank, ends[rank], remote, data, jobs)))
        processes[-1].start()
        remote.close()
        results.append(result)
    for peers in ends.values():
        for end in peers.values():
            end.close()
    try:
        return [_received(result) for result in results]
    finally:
        for process in processes:
            process.join(GUARD_SECONDS)
            process.kill()


def _received(result):
    assert result.poll(GUARD_SECONDS), "a worker did not finish in time"
    return result.recv()


def _worker(rank, peers, result, data, jobs):
    wire = Wire(rank, peers)
    values = {}
    for name, (function, arguments) in jobs.items():
        try:
            values[name] = function(rank, wire, data, **arguments)
        except Exception as error:
            traceback.print_exc()
            values[name] = f"{type(error).__name__}: {error}"
        wire.all_gather(name.encode())  # An error may have left the workers at different places of the job.
    values["torch"] = "torch" in sys.modules
    result.send(values)


class Wire:
    """An all-gather over pipes to every other worker."""

    def __init__(self, rank, peers):
        self.rank = rank
        self.peers = peers

    def all_gather(self, row):
        for peer in self.peers.values():
            peer.send_bytes(row)
        return [row if rank == self.rank else self.peers[rank].recv_bytes() for rank in range(WORKERS)]

    def sum(self, arrays):
        """The sums over all workers, added in the order of the ranks."""
        flat = np.concatenate([each.ravel() for each in arrays])
        total = sum(np.frombuffer(each) for each in self.all_gather(flat.tobytes()))
        cuts = np.cumsum([each.size for each in arrays])[:-1]
        return [part.reshape(each.shape) for part, each in zip(np.split(total, cuts), arrays, strict=True)]


def first_weights():
    generator = np.random.default_rng(1)
    return [generator.normal(size=(64, 10)) * 0.1, np.zeros(10)]


def gradients_of(weights, inputs, labels):
    """Of the mean cross entropy."""
    logits = inputs @ weights[0] + weights[1]
    wrong = np.exp(logits - logits.max(1, keepdims=True))
    wrong /= wrong.sum(1, keepdims=True)
    wrong[np.arange(len(labels)), labels] -= 1
    wrong /= len(labels)
    return [inputs.T @ wrong, wrong.sum(0)]


def loss_of(weights, data):
    logits = data[0] @ weights[0] + weights[1]
    chosen = logits[np.arange(len(logits)), data[1]]
    return float((np.log(np.exp(logits).sum(1)) - chosen).mean())


def rate_of(epoch):
    """A schedule."""
    return 0.3 * 0.9**epoch


class Momentum:
    """SGD with momentum, as torch has it."""

    def __init__(self, weights):
        self.weights = weights
        self.rate = rate_of(0)
        self.memory = [np.zeros_like(each) for each in weights]

    def step(self, gradients):
        for weight, memory, gradient in zip(self.weights, self.memory, gradients, strict=True):
            memory *= 0.9
            memory += gradient
            weight -= self.rate * memory


def seconds(rank, samples):
    """What a worker reports of its compute: worker 2 takes four times as long."""
    return samples * (4e-3 if rank == 2 else 1e-3)


def balanced(rank, wire, data, *, scheme, run_dir=None, stop_after=None):
    """Train behind a barrier: the weights, and the positions and sizes of every iteration.

    After `stop_after` iterations everything is made again, and goes on from the state.
    """
    import evenstep

    def made():
        return evenstep.Balancer(
            scheme,
            rank=rank,
            workers=WORKERS,
            all_gather=wire.all_gather,
            length=LENGTH,
            global_batch_size=GLOBAL,
            seed=SEED,
            run_dir=run_dir,
        )

    balancer, optimizer = made(), Momentum(first_weights())
    taken, epochs = [], []
    while (epoch := balancer.next_epoch) < EPOCHS:
        epochs.append(epoch)
        optimizer.rate = rate_of(epoch)
        for share in balancer.epoch(epoch):
            inputs, labels = (each[share.indices] for each in data)
            gradients = gradients_of(optimizer.weights, inputs, labels)
            balancer.report(seconds(rank, len(labels)))
            balancer.note(loss=loss_of(optimizer.weights, data))
            optimizer.step(wire.sum([each * share.weight for each in gradients]))
            taken.append((epoch, share.iteration, share.positions[: share.samples].tolist(), share.sizes.tolist()))
            if len(taken) == stop_after:
                state = balancer.state_dict()
                break
        if len(taken) == stop_after:
            balancer.close()
            balancer, stop_after = made(), None
            balancer.load_state_dict(state)
    balancer.close()
    return {"weights": optimizer.weights, "taken": taken, "epochs": epochs}


def in_environment(rank, wire, data, *, variables, **given):
    """The same with these variables."""
    with mock.patch.dict(os.environ, variables):
        return balanced(rank, wire, data, **given)


def alone(data):
    """The same mathematics in one process."""
    import evenstep

    balancer = evenstep.Balancer("bsp", rank=0, workers=1, length=LENGTH, global_batch_size=GLOBAL, seed=SEED)
    optimizer = Momentum(first_weights())
    for epoch in range(EPOCHS):
        optimizer.rate = rate_of(epoch)
        for share in balancer.epoch(epoch):
            with balancer.compute():
                gradients = gradients_of(optimizer.weights, *(each[share.indices] for each in data))
            optimizer.step(gradients)
    return optimizer.weights


def served(rank, wire, data, *, scheme, servers):
    """Train on parameter servers: the weights, and the positions and sizes of every share.

    For each further one of the `servers`, everything is made again after an epoch, and goes on from the state.
    """
    import evenstep

    def made(weights, servers):
        addresses, secret = servers
        return evenstep.Client(
            scheme,
            rank=rank,
            workers=WORKERS,
            weights=weights,
            options={"lr": rate_of(0), "momentum": 0.9},
            length=LENGTH,
            global_batch_size=GLOBAL,
            seed=SEED,
            servers=addresses,
            secret=secret,
        )

    servers = list(servers)
    client = made(first_weights(), servers.pop(0))
    taken, fresh = [], 0
    while (epoch := client.next_epoch) < EPOCHS:
        client.options["lr"] = rate_of(epoch)
        for share in client.epoch(epoch):
            gradients = gradients_of(client.weights, *(each[share.indices] for each in data))
            client.report(seconds(rank, share.samples))
            fresh += client.push(gradients) is not None
            taken.append((epoch, share.iteration, share.positions[: share.samples].tolist(), share.sizes.tolist()))
        if servers:
            weights, state = [each.copy() for each in client.weights], client.state_dict()
            client.close()
            client = made(weights, servers.pop(0))
            client.load_state_dict(state)
    weights = [each.copy() for each in client.weights]
    client.close()
    return {"weights": weights, "taken": taken, "fresh": fresh, "loss": loss_of(weights, data)}


def unlike(rank, wire, data, **of_worker_2):
    """Worker 2 is started with other arguments."""
    import evenstep

    given = {"scheme": "lb-bsp", "length": LENGTH, "global_batch_size": GLOBAL, "seed": SEED, "workers": WORKERS}
    if rank == 2:
        given |= of_worker_2
    evenstep.Balancer(rank=given.pop("as_rank", rank), all_gather=wire.all_gather, **given)


def skipping(rank, wire, data, *, skip):
    """Worker 2 does not do what it has to with its second share."""
    import evenstep

    balancer = evenstep.Balancer(
        "bsp", rank=rank, workers=WORKERS, all_gather=wire.all_gather, length=LENGTH, global_batch_size=GLOBAL
    )
    done = 0
    for epoch in range(2):
        for share in balancer.epoch(epoch):
            if skip == "compute" and rank == 2 and share.iteration == 1:
                continue
            if skip == "epoch" and rank == 2 and share.iteration == 1:
                break
            balancer.report(1e-3)
            done += 1
    return done


def unlike_client(rank, wire, data, **servers):
    """Worker 2 has another learning rate."""
    import evenstep

    given = {"rank": rank, "workers": WORKERS, "length": LENGTH, "global_batch_size": GLOBAL, **servers}
    evenstep.Client("asp", weights=first_weights(), options={"lr": 0.2 if rank == 2 else 0.1}, **given)


def same_rank(rank, wire, data, **servers):
    """Two processes come as worker 1; the one that is refused comes again as worker 2. Returns what was said."""
    import evenstep

    given = {"workers": WORKERS, "length": LENGTH, "global_batch_size": GLOBAL, "weights": first_weights(), **servers}
    said = ""
    try:
        client = evenstep.Client("asp", rank=min(rank, 1), **given)
    except evenstep.ConfigError as error:
        said, client = str(error), evenstep.Client("asp", rank=2, **given)
    client.close()
    return said
