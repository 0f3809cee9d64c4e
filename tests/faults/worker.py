"""What a worker of a cell runs: an ordinary training script with one fault in it, forked or as a program of its own."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from support import training
from support.training import Run
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from faults.cells import SCHEMES, Cell

RUN = Run(samples=96, batch_size=4, epochs=3)
MIDDLE = 3
"""The batch of the victim's, counted from 1, at which a fault in mid-epoch befalls it."""


class Fault:
    """The fault of a cell, which befalls its victim once, in its first life."""

    def __init__(self, cell, folder):
        self.cell = cell
        self.rank = int(os.environ["RANK"])
        self.life = int(os.environ.get("EVENSTEP_RESTART", "0"))
        self.due = self.rank == cell.victim and not self.life
        self.fired = Path(folder, "fired")

    def at(self, moment):
        if self.due and moment == self.cell.moment:
            self.due = False
            self.fired.write_text(str(os.getpid()))
            self.befall()

    def befall(self):
        fault = self.cell.fault
        if fault in ("killed", "stopped", "paused"):
            os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        elif fault == "raises":
            raise ValueError("boom")
        elif fault == "out of memory":
            raise torch.OutOfMemoryError("out of memory")
        elif fault == "hangs":
            threading.Event().wait()
        elif self.rank == 0:
            sys.exit(0)
        else:
            os._exit(0)


class Faulty:
    """A part of a checkpoint, in whose making the fault befalls."""

    def __init__(self, fault):
        self.fault = fault

    def state_dict(self):
        self.fault.at("checkpoint")
        return {}

    def load_state_dict(self, state):
        pass


def train(cell, folder):
    """Trains, and writes down each batch that was stepped on: life, epoch, positions, and if others did it instead."""
    fault = Fault(cell, folder)
    fault.at("start")
    model = training.model_of(RUN)
    optimizer = training.optimizer_of(RUN, model)
    data = DataLoader(TensorDataset(*training.data(RUN)), batch_size=RUN.batch_size, shuffle=True)
    model, optimizer, loader = evenstep.prepare(
        model, optimizer, data, scheme=SCHEMES[cell.scheme], timeout=cell.timeout
    )
    if cell.restarts and not cell.served:
        evenstep.checkpoint.restore(Path(folder, "checkpoints"), model, optimizer, loader)
    done = 0
    with Path(folder, f"journal-{fault.rank}").open("a", buffering=1) as journal:
        for epoch in range(loader.epoch, RUN.epochs):
            for inputs, targets in loader:
                done += 1
                positions, known = list(loader.current.positions[: loader.current.samples]), incarnation(loader)
                fault.at("first iteration" if done == 1 else "mid-epoch" if done == MIDDLE else "")
                training.step(model, optimizer, inputs, targets)
                journal.write(json.dumps([fault.life, epoch, positions, incarnation(loader) != known]) + "\n")
            if epoch == 0:
                fault.at("evaluation")
                save(cell, folder, fault, model, optimizer, loader)
    close, balancer = loader._engine.balancer.close, loader._engine.balancer

    def closing():
        fault.at("close")
        close()

    balancer.close = closing
    loader.close()
    Path(folder, f"finished-{fault.rank}").touch()


def incarnation(loader):
    """Which one of this worker the servers know; another one after a step: they had given the batch to others."""
    link = getattr(loader._engine, "_link", None)
    return None if link is None else link.incarnation


def save(cell, folder, fault, model, optimizer, loader):
    """A checkpoint as scripts write them: all together, or the state of the servers by each worker alone."""
    if not cell.served:
        evenstep.checkpoint.save(Path(folder, "checkpoints"), model, optimizer, loader, extras={"fault": Faulty(fault)})
        return
    link = loader._engine._link
    fetch = link.fetch_states

    def fetching():
        fault.at("checkpoint")
        return fetch()

    link.fetch_states = fetching
    optimizer.state_dict()


def run_forked(cell, rank, environment, folder):
    """A forked process is this worker: it ends as a program of its own would."""
    os.setsid()
    os.environ.update(environment, RANK=str(rank), WORLD_SIZE=environment["WORLD_SIZE"])
    terminal = os.open(os.path.join(folder, f"terminal-{rank}"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(terminal, 1)
    os.dup2(terminal, 2)
    torch.set_num_threads(1)
    try:
        train(cell, folder)
    except SystemExit:
        raise
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        sys.exit(1)


if __name__ == "__main__":
    train(Cell(**json.loads(sys.argv[1])), sys.argv[2])
