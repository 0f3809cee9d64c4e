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


@dataclass(frozen=True)
class Expected:
    """What comes of a cell.

    others: all other workers `finish` with every sample counted once, `fail` with an error that names the victim, or
    are `stopped` by the launcher with a sentence that does.
    named: The victim is named on the terminal.
    victim: it has `ended`; `finishes` too; is `ended` by the launcher; or `stays`, as nobody waits for it.
    """

    others: str
    named: bool
    victim: str


@dataclass(frozen=True)
class Cell:
    """A fault that befalls one worker at a moment."""

    fault: str
    moment: str
    scheme: str
    victim: int
    launcher: str = "forked"
    restarts: int = 0

    def __str__(self):
        again = f"-{self.restarts} restart" if self.restarts else ""
        return f"{self.scheme}-{self.moment}-worker {self.victim} {self.fault}-{self.launcher}{again}"

    def row(self, seconds):
        """Of the table: the cell, what came of it, and the seconds from the fault to the end of the others."""
        return [
            self.launcher,
            self.scheme,
            self.moment,
            self.fault,
            f"worker {self.victim}",
            self.expected.others,
            round(seconds, 1),
        ]

    @property
    def served(self):
        return self.scheme in SERVED

    @property
    def waits(self):
        """Whether the victim keeps others waiting, so that a limit has to pass."""
        return self.fault in ("stopped", "hangs")

    @property
    def timeout(self):
        """Seconds, as `prepare` takes them: short where it has to pass, long where it must not."""
        return 8.0 if self.waits or (self.fault, self.moment) == ("exits", "start") else 60.0

    @property
    def heartbeat(self):
        """Seconds that a worker may be silent to the servers."""
        return 1.5 if self.fault == "paused" and self.moment != "start" else 4.0

    @property
    def expected(self):
        if self.fault == "paused":
            return Expected("finish", False, "finishes")
        if self.restarts:
            return Expected("finish", True, "finishes")
        victim = "ended" if self.fault in ENDINGS else "stays"
        return self._on_servers(victim) if self.served else self._in_collectives(victim)

    def _in_collectives(self, victim):
        if self.moment == "close":  # All that they do together is done.
            return Expected("finish", False, victim)
        return Expected("fail", True, victim)

    def _on_servers(self, victim):
        if self.moment == "start":
            return Expected("stopped", True, "ended")
        if self.moment in ("first iteration", "mid-epoch"):
            return Expected("finish", True, "ended")
        # Between two epochs, and after the last one, only a barrier waits for it.
        waited_for = self.scheme == "grouped" and self.moment != "close"
        if self.fault == "hangs" and not waited_for:
            return Expected("finish", False, "stays")
        if self.fault == "exits" and self.moment == "close":
            return Expected("finish", False, "ended")
        return Expected("finish", True, "ended")


def forked_cells():
    """Every fault at every moment under every scheme, of worker 0 and of another, in processes that are forked."""
    return [
        Cell(fault, moment, scheme, victim)
        for scheme, moment, fault, victim in product(SCHEMES, MOMENTS, FAULTS, (0, COUNT - 1))
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
    return cells


def part(cells):
    """Few cells in which each pair of fault and moment, fault and scheme, moment and scheme occurs that any has."""
    missing = {pair for cell in cells for pair in _pairs(cell)}
    chosen = []
    for cell in sorted(cells, key=lambda cell: (cell.waits, cell.victim == 0)):
        if missing & _pairs(cell):
            missing -= _pairs(cell)
            chosen.append(cell)
    return chosen


def _pairs(cell):
    return {(cell.fault, cell.moment, ""), (cell.fault, "", cell.scheme), ("", cell.moment, cell.scheme)}
