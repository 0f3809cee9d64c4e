"""What a worker of a cell runs: an ordinary training script with one fault in it, forked or as a program of its own."""

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
import torch
from support import training
from support.training import Run
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from faults.cells import LINK, SCHEMES, SERVER, Cell

RUN = Run(samples=96, batch_size=4, epochs=3)
POLL_SECONDS = 0.02
MARK = "TEST_MARK"
"""In the environment of every process of a launched run."""
MIDDLE = 3
"""The batch of the victim's, counted from 1, at which a fault in mid-epoch befalls it."""


class Fault:
    """The fault of a cell that befalls this worker, or that it does to others, once and in its first life."""

    def __init__(self, cell, folder):
        self.cell = cell
        self.folder = Path(folder)
        self.rank = int(os.environ["RANK"])
        self.life = int(os.environ.get("EVENSTEP_RESTART", "0"))
        self.due = [] if self.life else [each for each in cell.faults.items() if self.rank == doer(cell, each[0])]

    def at(self, moment):
        if moment == self.cell.moment:
            due, self.due = self.due, []
            for victim, fault in due:
                self.befall(victim, fault)

    def befall(self, victim, fault):
        if victim == SERVER:
            self.others_are_hit()
            (server,) = servers()
            server.send_signal(signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
            self.fired(victim)
        elif victim == LINK:
            self.fired(victim)
            self.wait_for("cut")  # The test has done it.
        elif fault == "killed when all go on":
            self.wait_for("went-on")
            self.fired(victim)
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            self.fired(victim)
            befall(fault, self.rank)

    def others_are_hit(self):
        for victim in self.cell.faults:
            if victim != SERVER:
                self.wait_for(f"fired-{victim}")

    def fired(self, victim):
        file = self.folder / f"firing-{victim}"
        file.write_text(str(os.getpid()))
        file.rename(self.folder / f"fired-{victim}")

    def wait_for(self, name):
        while not (self.folder / name).exists():
            time.sleep(POLL_SECONDS)


def doer(cell, victim):
    """The worker in whose script a fault takes place."""
    if victim == SERVER:
        return 0
    return cell.side if victim == LINK else victim


def servers():
    """The servers of this run."""
    mark = os.environ[MARK]
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if "evenstep.server" in " ".join(process.cmdline()) and process.environ().get(MARK) == mark:
                yield process


def befall(fault, rank):
    if fault in ("killed", "stopped", "paused"):
        os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
    elif fault == "raises":
        raise ValueError("boom")
    elif fault == "out of memory":
        raise torch.OutOfMemoryError("out of memory")
    elif fault == "hangs":
        threading.Event().wait()
    elif rank == 0:
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
                Path(folder, f"hand-{fault.rank}").write_text(json.dumps([epoch, positions]))
                fault.at("first iteration" if done == 1 else "mid-epoch" if done == MIDDLE else "")
                training.step(model, optimizer, inputs, targets)
                journal.write(json.dumps([fault.life, epoch, positions, incarnation(loader) != known]) + "\n")
            if epoch == 0:
                fault.at("evaluation")
                save(cell, folder, fault, model, optimizer, loader)
    if cell.expected.others == "stopped" and fault.rank not in cell.faults:
        signal.pause()  # The launcher looks a few times a second, and this script could be done by then.
    close, tracker = loader.engine.tracker.close, loader.engine.tracker

    def closing():
        fault.at("close")
        close()

    tracker.close = closing
    loader.close()
    Path(folder, f"finished-{fault.rank}").touch()


def incarnation(loader):
    """Which one of this worker the servers know; another one after a step: they had given the batch to others."""
    link = getattr(loader.engine, "_link", None)
    return None if link is None else link.incarnation


def save(cell, folder, fault, model, optimizer, loader):
    """A checkpoint as scripts write them: all together, or the state of the servers by each worker alone."""
    if not cell.served:
        evenstep.checkpoint.save(Path(folder, "checkpoints"), model, optimizer, loader, extras={"fault": Faulty(fault)})
        return
    link = loader.engine._link
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
