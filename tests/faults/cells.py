"""The cells of the grid, and what each one promises."""

from dataclasses import dataclass
from itertools import product

COUNT = 3
"""Workers of a cell."""

FAULTS = ("killed", "stopped", "paused", "raises", "exits", "hangs", "out of memory")
"""SIGKILL, SIGSTOP for good and for 3 s, an exception, exit code 0, a main thread that waits for ever, no memory."""
ENDINGS = ("killed", "raises", "exits", "out of memory")
"""After these there is no such process any more."""
MOMENTS = ("start", "first iteration", "mid-epoch", "evaluation", "checkpoint", "close")
SCHEMES = {
    "lb-bsp": "lb-bsp",
    "local-sgd": "local-sgd:period=4",
    "ssp": "ssp:bound=1",
    "grouped": "grouped:groups=2,across=ssp:bound=1",
}
SERVED = ("ssp", "grouped")

PAUSE_SECONDS = 3.0
SERVER = "the server"
"""A victim, besides the workers by rank."""
LINK = "the link"
"""Between the two hosts of a run, each with one worker: the victim is the side whose end of it is taken down."""


@dataclass(frozen=True)
class Expected:
    """What comes of a cell.

    others: all other workers `finish` with every sample counted once, `fail` with an error that names a victim, or are
    `stopped` by the launcher with a sentence that does.
    named: The victims that are named on the terminal.
    victim: it has `ended`; `finishes` too; is `ended` by the launcher; or `stays`, as nobody waits for it.
    """

    others: str
    named: tuple
    victim: str


@dataclass(frozen=True)
class Cell:
    """Faults that befall workers at a moment; mostly one, of one worker."""

    fault: str
    moment: str
    scheme: str
    victim: int | str
    launcher: str = "forked"
    restarts: int = 0
    second_fault: str = ""
    second_victim: int | str = -1

    def __str__(self):
        again = f"-{self.restarts} restart" if self.restarts else ""
        return f"{self.scheme}-{self.moment}-{self.what}-{self.launcher}{again}"

    @property
    def faults(self):
        """By victim."""
        second = {self.second_victim: self.second_fault} if self.second_fault else {}
        return {self.victim: self.fault, **second}

    @property
    def side(self):
        """The end of the link that is cut."""
        return self.second_victim

    @property
    def what(self):
        names = [
            f"{name if isinstance(name, str) else f'worker {name}'} {fault}" for name, fault in self.faults.items()
        ]
        side = f" on the side of worker {self.side}" if self.victim == LINK else ""
        return ", ".join(names) + side

    @property
    def count(self):
        return 2 if self.launcher == "two hosts" else COUNT

    @property
    def others(self):
        """The workers that nothing befalls."""
        return {rank for rank in range(self.count) if rank not in self.faults}

    def row(self, seconds):
        """Of the table: the cell, what came of it, and the seconds from the fault to the end of the others."""
        return [self.launcher, self.scheme, self.moment, self.what, self.expected.others, round(seconds, 1)]

    @property
    def served(self):
        return self.scheme in SERVED

    @property
    def waits(self):
        """Whether a victim keeps others waiting, so that a limit has to pass."""
        return bool({"stopped", "hangs", "cut"} & set(self.faults.values()))

    @property
    def timeout(self):
        """Seconds, as `prepare` takes them: short where it has to pass, long where it must not."""
        if (not self.waits and (self.fault, self.moment) != ("exits", "start")) or self.victim == SERVER:
            return 60.0
        if self.second_victim == SERVER:  # Which must be back before it has passed.
            return 30.0
        return 8.0 if self.launcher == "forked" else 30.0

    @property
    def heartbeat(self):
        """Seconds that a worker may be silent: to the servers, which it finds again, or to the others for good."""
        if self.fault == "paused" and not self.served:
            return 20.0
        return 1.5 if self.fault == "paused" and self.moment != "start" else 4.0

    @property
    def expected(self):
        if self.launcher == "two hosts":
            return self._on_two_hosts()
        if self.victim == SERVER or self.second_victim == SERVER:
            named = tuple(victim for victim, fault in self.faults.items() if fault != "paused")
            return Expected("finish", named, "ended" if self.waits else "finishes")
        if self.fault == "paused":
            named = (self.second_victim,) if self.second_fault else ()
            others = "fail" if named and not self.served else "finish"
            return Expected(others, named, "" if named else "finishes")
        if self.restarts:
            return Expected("finish", (self.victim,), "finishes")
        if self.launcher == "torchrun" and self.served and self.fault == "killed":
            return Expected("stopped", (self.victim,), "ended")
        victim = "ended" if set(self.faults.values()) <= set(ENDINGS) else "stays"
        return self._on_servers(victim) if self.served else self._in_collectives(victim)

    def _in_collectives(self, victim):
        if self.moment == "close":  # All that they do together is done.
            return Expected("finish", (), victim)
        # With worker 0, which keeps the store, the others lose sight of who else has failed.
        return Expected("fail", (self.victim,), victim)

    def _on_servers(self, victim):
        named = tuple(self.faults)
        if self.moment == "start":
            return Expected("stopped", named, "ended")
        if self.moment in ("first iteration", "mid-epoch"):
            return Expected("finish", named, "ended")
        # Between two epochs, and after the last one, only a barrier waits for it.
        waited_for = self.scheme == "grouped" and self.moment != "close"
        if self.fault == "hangs" and not waited_for:
            return Expected("finish", (), "stays")
        if self.fault == "exits" and self.moment == "close":
            return Expected("finish", (), "ended")
        return Expected("finish", named, "ended")

    def _on_two_hosts(self):
        """The worker with the servers goes on without the other, which cannot."""
        if self.fault == "cut for a while":
            return Expected("finish", (), "finishes")
        return Expected("finish alone" if self.served else "fail", (1,), "")


def forked_cells():
    """Every fault at every moment under every scheme, of worker 0 and of another, in processes that are forked."""
    cells = [
        Cell(fault, moment, scheme, victim)
        for scheme, moment, fault, victim in product(SCHEMES, MOMENTS, FAULTS, (0, COUNT - 1))
    ]
    pairs = [("killed", 0, "killed", 2), ("killed", 1, "hangs", 2), ("paused", 1, "killed when all go on", 2)]
    return cells + [
        Cell(fault, "mid-epoch", scheme, victim, "forked", 0, second_fault, second_victim)
        for scheme, (fault, victim, second_fault, second_victim) in product(SCHEMES, pairs)
    ]


def launched_cells():
    """The same through the launchers, as far as they behave differently from each other."""
    cells = [
        Cell(fault, "mid-epoch", scheme, 1, "evenstep run") for scheme, fault in product(("lb-bsp", "ssp"), FAULTS)
    ]
    cells += [Cell(fault, "start", "ssp", 1, "evenstep run") for fault in ("killed", "raises", "hangs")]
    cells += [Cell(fault, "evaluation", "ssp", 1, "evenstep run") for fault in ("stopped", "exits")]
    cells += [Cell("killed", "mid-epoch", scheme, 1, "evenstep run", 1) for scheme in ("lb-bsp", "local-sgd", "ssp")]
    cells += [Cell(fault, "mid-epoch", "lb-bsp", 1, "torchrun") for fault in ("killed", "stopped", "exits", "hangs")]
    cells += [Cell(fault, "start", "lb-bsp", 1, "torchrun") for fault in ("killed", "hangs")]
    cells += [Cell(fault, "mid-epoch", "ssp", 1, "torchrun") for fault in ("killed", "exits", "paused")]
    stays = product(("stopped", "hangs"), (0, 1))
    cells += [Cell(fault, "mid-epoch", "ssp", victim, "torchrun") for fault, victim in stays]
    return cells


def server_cells():
    """Servers that are killed and stopped, also while a worker is stopped."""
    cells = [
        Cell(fault, moment, scheme, SERVER, "evenstep run")
        for scheme, (fault, moment) in product(
            SERVED, [("killed", "mid-epoch"), ("killed", "evaluation"), ("stopped", "mid-epoch"), ("stopped", "close")]
        )
    ]
    cells += [Cell(fault, "mid-epoch", "ssp", SERVER, "torchrun") for fault in ("killed", "stopped")]
    cells += [Cell("stopped", "mid-epoch", scheme, 1, "evenstep run", 0, "killed", SERVER) for scheme in SERVED]
    return cells


def link_cells():
    """Two hosts, whose link is cut on one side or the other."""
    return [
        Cell(fault, "mid-epoch", scheme, LINK, "two hosts", 0, "", side)
        for scheme, fault, side in product(("lb-bsp", "ssp"), ("cut for a while", "cut"), (0, 1))
    ]


def part(cells):
    """Few cells: of those that are forked, one for each fault and moment, fault and scheme, moment and scheme.

    Of the others one for each launcher and kind of victim, with servers and without.
    """
    missing = {pair for cell in cells for pair in _pairs(cell)}
    chosen = []
    for cell in sorted(cells, key=lambda cell: (cell.waits, cell.victim == 0)):
        if missing & _pairs(cell):
            missing -= _pairs(cell)
            chosen.append(cell)
    return chosen


def _pairs(cell):
    if cell.launcher != "forked":
        return {(cell.launcher, cell.victim == SERVER, cell.served)}
    return {(cell.fault, cell.moment, ""), (cell.fault, "", cell.scheme), ("", cell.moment, cell.scheme)}
