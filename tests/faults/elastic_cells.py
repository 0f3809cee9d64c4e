"""The cells of elastic runs: what befalls a replica, when, and what must come of it."""

from dataclasses import dataclass

ELASTIC = "elastic"
COUNT = 3
"""Replicas of a cell; on two hosts, one of them is on the second."""
SENDER = "the sender"
"""A victim: the replica that sends its state to one that joins, whichever it is."""
LINK = "the link"
"""A victim: the link between the two hosts, cut at one end."""
HOST = "the host of the Lighthouse"
"""A victim: the launcher on the first host, with the Lighthouse and the replicas there."""
HEARTBEAT_SECONDS = 4.0

PERIOD = "period"
"""A moment: in the second of the three iterations of a period, under local steps."""

WHY = {
    "killed": "was killed by SIGKILL; it is started again",
    "raises": "ended with exit code 1; it is started again",
    "stopped": "stood still",
    "hangs": "kept the others waiting for",
}
"""By fault, what the terminal says of the victim; nothing where it is not lost, or where nobody can tell."""
COMES_BACK = ("killed", "raises", "paused", "cut for a while", "killed and started again")


@dataclass(frozen=True)
class ElasticCell:
    """A fault of one replica, or of two in the same step.

    At the moments `joins` and `sends` replica 2 has been killed before, and its second process joins. With `split`, the
    dimension of a mesh, replicas have two processes each, and it is the one of this `rank` among them.
    """

    fault: str
    moment: str
    victim: int | str
    second_victim: int = -1
    hosts: int = 1
    split: tuple = ()
    rank: int = 0

    def __str__(self):
        split = [*self.split, str(self.rank)] if self.split else []
        return "-".join(["elastic", self.moment, self.what, str(self.hosts), *split]).replace(" ", "-")

    @property
    def processes(self):
        """Of each replica."""
        return 2 if self.split else 1

    @property
    def what(self):
        names = [f"{each if isinstance(each, str) else f'worker {each}'} {self.fault}" for each in self.victims]
        return ", ".join(names)

    @property
    def victims(self):
        return (self.victim,) if self.second_victim < 0 else (self.victim, self.second_victim)

    @property
    def why(self):
        return WHY.get(self.fault, "")

    @property
    def timeout_seconds(self):
        """Of the launcher: some wait for six times as long where two hang, for a host, and for one that is cut off."""
        six = self.fault == "cut" or (self.fault == "hangs" and self.second_victim >= 0)
        return 30.0 if self.victim == HOST else 5.0 if six else 10.0

    @property
    def joins(self):
        """Whether a replica joins as the fault takes place."""
        return self.moment in ("joins", "sends")

    @property
    def scheme(self):
        return "local-sgd:period=3" if self.moment == PERIOD else "lb-bsp"

    @property
    def members(self):
        """How many replicas are there at the end."""
        gone = 0 if self.fault in COMES_BACK else 1 if self.victim == LINK else len(self.victims)
        return COUNT - gone

    @property
    def codes(self):
        """The exit codes of the launchers, by host."""
        return [0, 1] if self.fault == "cut" else [0] * self.hosts

    def row(self, seconds):
        """Of the table: the cell, and the seconds from the fault to the next step that counts."""
        two = {"killed": "two killed", "stopped": "two stopped", "hangs": "two hang"}
        outside = {LINK: f"link {self.fault}", HOST: "Lighthouse killed"}
        what = f"rank {self.rank} of two {self.fault}" if self.split else self.fault
        what = two[self.fault] if self.second_victim >= 0 else outside.get(self.victim, what)
        return [ELASTIC, "", self.moment, what, "finish", round(seconds, 1)]


def elastic_cells():
    """Every fault in mid-epoch, some at the other moments, and what needs two hosts."""
    faults = ("killed", "raises", "stopped", "paused", "hangs")
    cells = [ElasticCell(fault, "mid-epoch", 1) for fault in faults]
    cells += [ElasticCell(fault, "start", 1) for fault in ("killed", "raises")]
    cells += [ElasticCell(fault, "first iteration", 0) for fault in ("killed", "hangs")]
    cells += [ElasticCell(fault, "commit", 2) for fault in ("killed", "stopped", "raises")]
    cells += [ElasticCell(fault, "joins", 2) for fault in ("killed", "stopped", "raises")]
    cells += [ElasticCell(fault, "sends", SENDER) for fault in ("killed", "stopped")]
    cells += [ElasticCell(fault, PERIOD, 1) for fault in ("killed", "stopped", "raises", "hangs")]
    cells += [ElasticCell(fault, "mid-epoch", 0, 2) for fault in ("killed", "stopped", "hangs")]
    cells += [ElasticCell(fault, "mid-epoch", LINK, hosts=2) for fault in ("cut", "cut for a while")]
    split = [("killed", 0), ("stopped", 0), ("killed", 1), ("raises", 1), ("stopped", 1)]
    cells += [ElasticCell(fault, "mid-epoch", 1, split=("tp",), rank=rank) for fault, rank in split]
    cells += [ElasticCell("killed", "joins", 2, split=("tp",), rank=1)]
    return [*cells, ElasticCell("killed and started again", "mid-epoch", HOST, hosts=2)]


def elastic_part(cells):
    """Those that are always run."""
    return [each for each in cells if each.fault == "killed" and (each.moment == "commit" or each.split)]
