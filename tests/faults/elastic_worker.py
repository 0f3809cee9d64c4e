"""What a replica of an elastic cell runs: an ordinary script, with the fault of the cell."""

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from support.elastic import Elastic, counting, parts, split

import evenstep
from faults.elastic_cells import COUNT, HOST, LINK, PERIOD, SENDER, ElasticCell

RUN = Elastic(replicas=COUNT, samples=288, global_batch_size=24)
STEP, REST, POLL_SECONDS = 4, 8, 0.02
"""The step of faults, and the one in which those that nothing befell wait for the victims that come back."""


class Faults:
    """What befalls this replica, in which life of its."""

    def __init__(self, cell, folder):
        self.cell, self.folder = cell, Path(folder)
        self.slot, self.life = int(os.environ["RANK"]), int(os.environ["EVENSTEP_RESTART"])
        self.rank = self.slot if cell.split else 0
        self.slot = int(os.environ.get("REPLICA_GROUP_ID", self.slot))
        self.host = int(os.environ.get("TEST_HOST", "0"))
        self.slot += 2 * self.host

    def at(self, moment):
        cell, fault = self.cell, self.cell.fault
        if self.rank != cell.rank:
            return
        if cell.joins and (moment, self.slot, self.life) == ("mid-epoch", 2, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        mine = self.slot in cell.victims and self.life == (cell.moment == "joins")
        sends = cell.victim == SENDER and self.slot != 2 and self.life == 0
        outside = cell.victim in (LINK, HOST) and self.slot == (2 if cell.victim == LINK else 0) and self.life == 0
        if moment != cell.moment or not (mine or sends or outside):
            return
        if sends:
            with suppress(FileExistsError):
                (self.folder / "sends").touch(exist_ok=False)
                self.befall(fault)
        elif outside:
            if not (self.folder / f"fired-{cell.victim}").exists():
                self.fired(cell.victim)
                threading.Event().wait() if cell.victim == HOST else self.wait_for("cut")
        else:
            self.befall(fault)

    def befall(self, fault):
        self.fired(self.slot)
        if fault in ("killed", "stopped", "paused"):
            os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        elif fault == "raises":
            raise ValueError("boom")
        else:
            threading.Event().wait()

    def fired(self, name):
        firing = self.folder / f"firing-{name}"
        firing.write_text(str(os.getpid()))
        firing.rename(self.folder / f"fired-{name}")

    def wait_for(self, name):
        while not (self.folder / name).exists():
            time.sleep(POLL_SECONDS)

    def wait_for_others(self, step):
        """Wait for the victims that come back."""
        cell, last = self.cell, self.life + 1
        if step != REST or self.life or self.slot in cell.victims:
            return
        if cell.joins:
            self.wait_for("here-2-1")
        elif cell.fault in ("killed", "raises"):
            for victim in cell.victims:
                self.wait_for(f"here-{victim}-{last}")
        elif cell.fault in ("paused", "cut for a while"):
            self.wait_for("went-on")
        elif cell.victim == HOST:
            self.wait_for("here-0-0-again")


def train(cell, folder):
    faults = Faults(cell, folder)
    faults.at("start")
    torch.set_num_threads(1)
    os.environ["SLOT"] = str(faults.slot)
    model, optimizer, loader = parts(RUN)
    model, optimizer, weights, told = split(replace(RUN, split=tuple(cell.split)), model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
    model, optimizer, loader = evenstep.prepare(
        model,
        optimizer,
        loader,
        scheme=cell.scheme,
        global_batch_size=RUN.global_batch_size,
        schedulers=scheduler,
        **told,
    )
    session, name = loader.session, f"{faults.slot}-{faults.life}"
    watch_moments(session, faults)
    again = "-again" if Path(folder, f"here-{name}").exists() else ""
    for each in (f"here-{name}{again}", f"here-{faults.slot}"):
        Path(folder, each).touch()
    for slot in range(COUNT):  # Their heartbeats have begun, so that the first quorum waits for all.
        faults.wait_for(f"here-{slot}")
    members, epoch, moment = 0, 0, "first iteration"
    with (
        Path(folder, f"{'steps' if faults.rank == 0 else 'peer'}-{name}{again}").open("a", buffering=1) as journal,
        counting(session, lambda line, counts: record(journal, line, counts)) as pending,
    ):
        while members != cell.members or len(list(faults.folder.glob("fired-*"))) < len(cell.victims):
            members = 0
            for inputs, targets in loader:
                epoch, step = loader.epoch, session.step
                faults.wait_for_others(step)
                faults.at(moment if step != STEP else PERIOD if len(pending) == 1 else "mid-epoch")
                moment = ""
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                scheduler.step()
                members = len(loader.batch_sizes)
                if members != cell.members:  # This may be for long, on a busy machine.
                    time.sleep(POLL_SECONDS)
                line = {"step": step, "epoch": epoch, "sizes": loader.batch_sizes, "slot": faults.slot}
                line |= {"positions": list(loader.current.positions[: loader.current.samples]), "life": faults.life}
                line |= {"iteration": loader.current.iteration}
                if cell.moment == PERIOD:
                    pending.append(line)
                else:
                    record(journal, line, session.counted)
    outcome = {"epochs": epoch + 1, "weights": weights().tolist()}
    if faults.rank == 0:
        Path(folder, f"finished-{name}{again}").write_text(json.dumps(outcome))


def record(journal, line, counted):
    journal.write(json.dumps(line | {"counted": counted, "at": time.time()}) + "\n")


def watch_moments(session, faults):
    """The moments inside of the session: the state is sent and received, and the step is about to count."""
    manager = session._quorum._manager
    commit = manager.should_commit

    def should_commit():
        counts = commit()
        if session.step == STEP + 1 and counts:
            faults.at("commit")
        return counts

    def load(state):
        faults.at("joins")
        session._receive(state)

    def save():
        if session.step >= STEP:  # Not at first, when only one may have a state to lose.
            faults.at("sends")
        return session._save()

    manager.should_commit = should_commit
    (key,) = manager._load_state_dict_fns
    manager._load_state_dict_fns[key], manager._user_state_dicts[key] = load, save


if __name__ == "__main__":
    train(ElasticCell(**json.loads(sys.argv[1])), sys.argv[2])
