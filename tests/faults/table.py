"""Writes what came of the cells of the grid as a page of the documents."""

import platform
from collections import defaultdict

import torch

from faults.cells import COUNT, FAULTS, MOMENTS, SCHEMES
from faults.storage_cells import STORAGE

_INTRO = f"""\
# What happens when a worker is lost

`make faults` makes this page. Each cell below is a run of real processes in which a fault takes place. Then it is
checked that the fault did take place, that everything ended or went on, that the lost worker was named on the terminal,
that each sample of each epoch counted once, and that no process, file or shared memory was left behind (sockets and
segments have no names in the file system, and end with their processes). A run has {COUNT} workers. The faults are:

- **killed**: SIGKILL
- **stopped**: SIGSTOP, and the worker never goes on
- **paused**: SIGSTOP, and SIGCONT after 3 s
- **raises**: an exception in the script
- **exits**: `sys.exit(0)` on worker 0, `os._exit(0)` on another
- **hangs**: the main thread waits for ever, while the other threads of the process run
- **out of memory**: the device's memory is exhausted

Outcomes are those of the workers that nothing befell:

- **finish**: they train to the end, and on each sample once. Where the victim may come back, it finishes too. Servers
  that come back after a death go on from their last snapshot, and say how many commits that lost.
- **fail**: each of them ends with an error that names the victim. Start again from a checkpoint, or have
  `evenstep run --max-restarts` do so.
- **stopped**: the launcher ends the run, and names the victim.

The seconds are from the fault to the end of the run, with `--heartbeat 4` (20 behind a barrier where a worker is
paused), and with `timeout=8` (under a launcher 30) where a worker has to be waited for. Elsewhere it is 60: without a
launcher, a worker that ends before `prepare` is missed only after that. In the first tables each entry is of two cells,
one for worker 0 and one for worker {COUNT - 1}, and has the longer time. The machine ran several cells at a time.
"""

_STORAGE_INTRO = """\
`lb-bsp` on two workers saves and restores checkpoints, and two servers their snapshots. The fault befalls one operation
on a file: ENOSPC, EROFS until the save is over, EACCES for a second, or a file that is cut short or has another bit.
What is refused, is refused with a sentence; a script that catches it trains on, and so do runs on servers. Then the run
is started again from what there was, and its last weights are compared with those of an undisturbed one. No file of the
user's is touched.
"""


def write(path, rows):
    """A page of rows as `Cell.row` gives them."""
    versions = f"Python {platform.python_version()}, PyTorch {torch.__version__}, {len(rows)} cells.\n"
    path.write_text("\n".join([_INTRO, versions, *_single(rows), *_others(rows), *_storage(rows)]), encoding="utf-8")


def _single(rows):
    """A table for each scheme: faults by moments."""
    cells = defaultdict(list)
    for launcher, scheme, moment, what, outcome, seconds in rows:
        if launcher == "forked" and "," not in what:
            cells[scheme, what.split(" ", 2)[2], moment].append((outcome, seconds))
    for scheme, name in SCHEMES.items():
        yield f"## `{name}`, one fault\n"
        yield _line(["", *MOMENTS])
        yield _line(["---"] * (1 + len(MOMENTS)))
        for fault in FAULTS:
            yield _line([fault, *(_outcome(cells[scheme, fault, moment]) for moment in MOMENTS)])
        yield ""


def _outcome(cells):
    outcomes = " or ".join(dict.fromkeys(outcome for outcome, _ in cells))
    return f"{outcomes}, {max(seconds for _, seconds in cells):.1f} s" if cells else ""


def _others(rows):
    """Under the launchers, several faults, servers, and two hosts."""
    yield "## Under the launchers, several faults, servers and links\n"
    yield _line(["started by", "scheme", "moment", "faults", "the others", "seconds"])
    yield _line(["---"] * 6)
    for launcher, scheme, moment, what, outcome, seconds in rows:
        if launcher not in ("forked", STORAGE) or (launcher == "forked" and "," in what):
            yield _line([launcher, f"`{SCHEMES[scheme]}`", moment, what, outcome, f"{seconds:.1f}"])
    yield ""


def _storage(rows):
    """While checkpoints and snapshots are saved and restored."""
    yield "## Storage\n"
    yield _STORAGE_INTRO
    yield _line(["moment", "fault", "outcome"])
    yield _line(["---"] * 3)
    for launcher, _, moment, what, outcome, _ in rows:
        if launcher == STORAGE:
            yield _line([moment, what, outcome])
    yield ""


def _line(cells):
    return f"| {' | '.join(cells)} |"
