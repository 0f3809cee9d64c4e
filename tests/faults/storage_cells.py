"""The cells of the grid in which the storage fails while a checkpoint or a snapshot is saved or restored."""

from dataclasses import dataclass
from itertools import product

STORAGE = "storage"
"""In the place of a launcher, in the rows of the table."""
FULL, READ_ONLY, REFUSED = "full", "read-only", "refused for a second"
"""ENOSPC; EROFS until the save is over; EACCES."""
CUT, FLIPPED = "file cut", "bit flipped"


@dataclass(frozen=True)
class Place:
    """An operation on a file: the event of `sys.addaudithook`, and how its path ends.

    Attributes:
        number: Which such operation it is, from 0.
        worker: By which worker, or which server; None for any.
        damaged: The file that is damaged then, by the end of its path.
    """

    event: str
    path: str
    number: int = 0
    worker: int | None = 0
    damaged: str = ""


CHECKPOINT_SAVING = {
    "the folder": Place("os.mkdir", ".partial-checkpoint-000002"),
    "the lock": Place("write", "manifest.json"),
    "the values": Place("write", "values.pt"),
    "the run": Place("write", "run.json"),
    "the generators": Place("write", "generators-1.pt", worker=1),
    "the tensors": Place("write", ".distcp"),
    "the metadata": Place("write", "tensors/.metadata.tmp"),
    "the digests": Place("read", "values.pt", number=1),  # After that of the fsync.
    "the manifest": Place("write", "manifest.json", number=1),
    "the name": Place("os.rename", ".partial-checkpoint-000002"),
    "the sync of the name": Place("read", "checkpoints"),
    "the rotation": Place("os.remove", "values.pt"),
}
CHECKPOINT_FILES = (
    "manifest.json", "run.json", "values.pt", "generators-0.pt", "generators-1.pt", "tensors/.metadata", ".distcp",
)  # fmt: skip
CHECKPOINT_RESTORING = {
    "the list": Place("os.listdir", "checkpoints"),
    "the manifest": Place("read", "manifest.json"),
    "the check": Place("read", "generators-0.pt"),
    "the run": Place("read", "run.json", number=1),
    "the values": Place("read", "values.pt", worker=1),  # Worker 0 checks this one, and worker 1 the metadata.
    "the generators": Place("read", "generators-1.pt", number=1, worker=1),
    "the metadata": Place("read", "tensors/.metadata"),
    "the metadata, by torch": Place("read", "tensors/.metadata", number=1),
    "the tensors": Place("read", ".distcp", number=1),
}
SNAPSHOT_SAVING = {
    "the folder": Place("os.mkdir", "version-000000000036", worker=None),  # Whichever server makes it first.
    "the state": Place("write", "version-000000000036/.shard-1.partial", worker=1),
    "the digest": Place("write", "version-000000000036/shard-0.json"),
    "the name": Place("os.rename", "version-000000000036/.shard-1.partial", worker=1),
    "the sync of the name": Place("read", "version-000000000036"),
    "the rotation": Place("os.rmdir", "version-000000000012", worker=None),
}
SNAPSHOT_FILES = ("shard-0.pt", "shard-0.json")
SNAPSHOT_RESTORING = {
    "the list": Place("os.listdir", "snapshots"),
    "the check": Place("read", "version-000000000036/shard-1.pt"),
    "the digest": Place("read", "version-000000000036/shard-0.json"),
    "the state": Place("read", "version-000000000036/shard-1.pt", worker=1),
}


@dataclass(frozen=True)
class StorageCell:
    """A fault of the storage at an operation, in the first life of a run, which saves, or in the second.

    Attributes:
        outcome: What comes of the save or of the restoring: `saved`, `restored`, or `refused` with a sentence.
        newest: Whether the run then goes on from what was being saved; None where that depends on the time.
    """

    what: str
    doing: str
    moment: str
    fault: str
    place: Place
    outcome: str
    newest: bool | None

    def __str__(self):
        return f"{self.what}-{self.doing}-{self.moment}-{self.fault}"

    @property
    def scheme(self):
        return "lb-bsp" if self.what == "checkpoint" else "ssp"

    def row(self, seconds):
        """Of the table, as `Cell.row` gives it."""
        newest = {True: "the newest", False: "the one before", None: "the newest or the one before"}[self.newest]
        moment = f"{self.what}, {self.doing}: {self.moment}"
        return [STORAGE, self.scheme, moment, self.fault, f"{self.outcome}, and goes on from {newest}", seconds]


def storage_cells():
    """Each fault at each operation that can meet it."""
    cells = []
    for what, places in (("checkpoint", CHECKPOINT_SAVING), ("snapshot", SNAPSHOT_SAVING)):
        for (moment, place), fault in product(places.items(), (FULL, READ_ONLY, REFUSED)):
            if fault == FULL and (place.event in ("read", "os.remove", "os.rmdir") or moment == "the lock"):
                continue  # These need no room.
            if fault == READ_ONLY and place.event == "read":
                continue
            named = moment in ("the sync of the name", "the rotation")
            outcome = "saved" if moment == "the rotation" else "refused"
            again = what == "snapshot" and fault != READ_ONLY  # When the servers end.
            cells.append(
                StorageCell(what, "saving", moment, fault, place, outcome, named or (None if again else False))
            )
    for what, files, done in (
        ("checkpoint", CHECKPOINT_FILES, Place("os.rename", ".partial-checkpoint-000002")),
        ("snapshot", SNAPSHOT_FILES, Place("read", "version-000000000036")),
    ):
        for file, fault in product(files, (CUT, FLIPPED)):
            place = Place(done.event, done.path, damaged=file)
            cells.append(StorageCell(what, "saving", f"{file} once written", fault, place, "saved", False))
    for what, places in (("checkpoint", CHECKPOINT_RESTORING), ("snapshot", SNAPSHOT_RESTORING)):
        for moment, place in places.items():
            # torch tries once.
            outcome = "refused" if moment in ("the metadata, by torch", "the tensors") else "restored"
            cells.append(StorageCell(what, "restoring", moment, REFUSED, place, outcome, True))
    # To restore, nothing is written.
    first = CHECKPOINT_RESTORING["the list"]
    return [*cells, StorageCell("checkpoint", "restoring", "the list", READ_ONLY, first, "restored", True)]


def storage_part(cells):
    """One of each fault, while each is saved and restored."""
    return list({(cell.what, cell.doing, cell.fault): cell for cell in cells}.values())
