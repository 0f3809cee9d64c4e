"""The cells of the grid in which the storage fails while a checkpoint or a snapshot is saved or restored."""

from dataclasses import dataclass
from itertools import product

STORAGE = "storage"
"""In the place of a launcher, in the rows of the table."""
SAVING, SAVING_ASIDE, RESTORING = "saving", "saving while training goes on", "restoring"
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
    "the tensors": Place("write", "__0_0.distcp"),
    "the generators": Place("write", "__1_0.distcp", worker=1),  # All that worker 1 writes of a model that is whole.
    "the digests": Place("read", "__0_0.distcp", number=1),  # After that of the fsync.
    "the metadata": Place("write", ".metadata.tmp"),
    "the manifest": Place("write", "manifest.json", number=1),
    "the name": Place("os.rename", ".partial-checkpoint-000002"),
    "the sync of the name": Place("read", "checkpoints"),
    "the rotation": Place("os.remove", "manifest.json"),
}
WRITTEN_BY_A_THREAD = ("the tensors", "the generators", "the metadata", "the name")
CHECKPOINT_FILES = ("manifest.json", ".metadata", "__0_0.distcp", "__1_0.distcp")
CHECKPOINT_RESTORING = {
    "the list": Place("os.listdir", "checkpoints"),
    "the manifest": Place("read", "manifest.json"),
    "the check": Place("read", "__1_0.distcp"),  # Worker 0 checks this one and the metadata, and worker 1 the other.
    "the metadata": Place("read", ".metadata", number=1),
    "the metadata, by torch": Place("read", ".metadata", number=2),
    "the values": Place("read", "__0_0.distcp"),
    "the generators": Place("read", "__1_0.distcp", worker=1),
    "the tensors": Place("read", "__0_0.distcp", number=1),
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
    aside = {moment: CHECKPOINT_SAVING[moment] for moment in WRITTEN_BY_A_THREAD}
    for what, doing, places in (
        ("checkpoint", SAVING, CHECKPOINT_SAVING),
        ("checkpoint", SAVING_ASIDE, aside),
        ("snapshot", SAVING, SNAPSHOT_SAVING),
    ):
        for (moment, place), fault in product(places.items(), (FULL, READ_ONLY, REFUSED)):
            if fault == FULL and (place.event in ("read", "os.remove", "os.rmdir") or moment == "the lock"):
                continue  # These need no room.
            if fault == READ_ONLY and place.event == "read":
                continue
            named = moment in ("the sync of the name", "the rotation")
            outcome = "saved" if moment == "the rotation" else "refused"
            again = what == "snapshot" and fault != READ_ONLY  # When the servers end.
            cells.append(StorageCell(what, doing, moment, fault, place, outcome, named or (None if again else False)))
    for what, files, done in (
        ("checkpoint", CHECKPOINT_FILES, Place("os.rename", ".partial-checkpoint-000002")),
        ("snapshot", SNAPSHOT_FILES, Place("read", "version-000000000036")),
    ):
        for file, fault in product(files, (CUT, FLIPPED)):
            place = Place(done.event, done.path, damaged=file)
            cells.append(StorageCell(what, SAVING, f"{file} once written", fault, place, "saved", False))
    for what, places in (("checkpoint", CHECKPOINT_RESTORING), ("snapshot", SNAPSHOT_RESTORING)):
        for moment, place in places.items():
            cells.append(StorageCell(what, RESTORING, moment, REFUSED, place, "restored", True))
    # To restore, nothing is written.
    first = CHECKPOINT_RESTORING["the list"]
    return [*cells, StorageCell("checkpoint", RESTORING, "the list", READ_ONLY, first, "restored", True)]


def storage_part(cells):
    """One of each fault, while each is saved and restored."""
    return list({(cell.what, cell.doing, cell.fault): cell for cell in cells}.values())
