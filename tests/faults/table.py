"""Writes what came of the cells of the grid as a page of the documents.

Those of another framework are run in an environment of its own, and have a section each, as have elastic runs.
"""

import platform
import re
from collections import defaultdict
from importlib.metadata import version

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
`lb-bsp` on two workers saves checkpoints, at once or while training goes on, and restores them, and two servers their
snapshots. The fault befalls one operation on a file: ENOSPC, EROFS until the save is over, EACCES for a second, or a
file that is cut short or has another bit. What is refused, is refused with a sentence; a script that catches it trains
on, and so do runs on servers. Then the run is started again from what there was, and its last weights are compared with
those of an undisturbed one. No file of the user's is touched.
"""


_UNDER_RUN = """\
Worker 1 of three under `evenstep run`, with `--heartbeat 2`, and with `--timeout 20` where it hangs and at the start.
The run ends, and the terminal names worker 1 (**stopped**); `prepare` ends on all workers with an error that names it
(**refused**); or all train to the end (**finish**). At the end nobody waits for a worker that is stopped or hangs. The
seconds are to the end of the run, from the fault or, in the last four rows, from before `prepare`. The machine ran
several cells, and other tests, at a time.

- **another model**: a weight of another shape on worker 1
- **other data**: the same samples in another order
- **NaN**: in its gradient, which is left out; a warning names worker 1
- **NaN refused**: the same with `nonfinite=refuse`
"""
_UNDER_FLOWER = """\
One of three nodes, in its second piece of work, under `LoadBalanced` with `patience=1.5` (with rounds) and under
`Asynchronous` with `ssp:bound=1` and `timeout=20` (without rounds). The log names the node, the other nodes do the
work, and training ends after all of it (**finish**).

- **killed**, **stopped**: the SuperNode and its app
- **raises**, **exits**, **hangs**: the app
- **another model**: a reply with arrays of another shape
- **NaN**: a reply with NaNs
- **lies**: a reply that says that it took 1e9 s, on which nothing rests without rounds
"""
_ELASTIC = """\
Three replicas under `evenstep run --elastic 1:3`, with `--heartbeat 4` and `--timeout 10` (5 where two hang and where
the link is cut for good, 30 where the Lighthouse is killed); the last rows are of two hosts, with one replica on the
second. The others **finish**, and so does the victim if it is started again, goes on or is reached again. It is checked
that each of them lost at most the step in flight, that no sample counted twice, that the last weights are those of one
process to 1e-10, and that the terminal names who was lost and why. The seconds are from the fault to the next step that
counted: a replica that is stopped in a step is ended after `--heartbeat`, and two that hang are once the third has
waited for six times `--timeout`. The machine ran other tests meanwhile.

- **first iteration**, **mid-epoch**: in the script, between a batch and its backward
- **commit**: the victim has found out that the step counts, and has not stepped yet
- **joins**: the victim is about to use the state that it received
- **sends**: the victim is about to send its state to a replica that joins
- **period**: in the second of three iterations under `local-sgd:period=3`, where the others lose at most the period in
  flight, and the weights are those of the algorithm in one process
- **killed**: SIGKILL; **stopped**: SIGSTOP; **paused**: SIGSTOP, and SIGCONT after 3 s
- **raises**: an exception in the script; **hangs**: the main thread waits for ever
- **link cut**: on the side of the second host, for 3 s or for good; then `evenstep run` ends there with an error, once
  its replica has asked for the others for six times `--timeout` and was started again in vain
- **rank 0 of two**, **rank 1 of two**: of a replica's processes, with `--nproc-per-replica 2` and tensor parallelism
- **Lighthouse killed**: `evenstep run` on the first host, with its replicas; then the same command again
"""
FRAMEWORKS = {
    "elastic": ("Elastic runs", "torchft", _ELASTIC),
    "tensorflow": ("TensorFlow", "tensorflow-cpu", _UNDER_RUN),
    "jax": ("JAX", "jax", _UNDER_RUN),
    "mxnet": ("MXNet", "mxnet", _UNDER_RUN),
    "flower": ("Flower", "flwr", _UNDER_FLOWER),
}
"""By the first value of a row: the name, the package, and what a section says."""
_SECTIONS = re.compile(
    rf"^## (?:{'|'.join(name for name, *_ in FRAMEWORKS.values())})\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE
)
_ORDER = (
    *("killed", "stopped", "paused", "hangs", "exits", "raises", "another model", "other data", "NaN", "NaN refused"),
    *("lies", "two killed", "two stopped", "two hang", "link cut", "link cut for a while", "Lighthouse killed"),
    *("start", "first iteration", "mid-epoch", "commit", "joins", "sends", "period", "evaluation", "close"),
    *("with rounds", "without rounds"),
)
"""Of the rows and columns of a section."""


def write(path, rows):
    """Put rows as `Cell.row` gives them onto the page: all of it, or the sections of other frameworks."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    sections = {each.partition("\n")[0]: each for each in _SECTIONS.findall(text)}
    own = [row for row in rows if row[0] not in FRAMEWORKS]
    if own:
        versions = f"Python {platform.python_version()}, PyTorch {version('torch')}, {len(own)} cells.\n"
        text = "\n".join([_INTRO, versions, *_single(own), *_others(own), *_storage(own)])
    for framework, (name, *_) in FRAMEWORKS.items():
        if found := [row for row in rows if row[0] == framework]:
            heading = f"## {name}"
            sections[heading] = "\n".join(_framework(framework, found, _held(sections.get(heading, ""))))
    page = [_SECTIONS.sub("", text).rstrip("\n"), *(sections[each].rstrip("\n") for each in sorted(sections))]
    path.write_text("\n\n".join(page) + "\n", encoding="utf-8")


def _held(section):
    """The cells of the table of a section, by fault and moment; those that are not run now stay."""
    lines = [[each.strip() for each in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    moments = lines[0][1:] if lines else []
    return {
        (fault, moment): cell
        for fault, *found in lines[2:]
        for moment, cell in zip(moments, found, strict=True)
        if cell
    }


def _framework(framework, rows, held):
    """A table of faults by moments, under a heading."""
    name, package, intro = FRAMEWORKS[framework]
    cells = held | {(fault, moment): _outcome([(outcome, s)]) for _, _, moment, fault, outcome, s in rows}
    faults, moments = (sorted(dict.fromkeys(key[at] for key in cells), key=_place) for at in (0, 1))
    yield f"## {name}\n"
    yield intro
    of = package if framework == "elastic" else name
    yield f"Python {platform.python_version()}, {of} {version(package)}, {len(cells)} cells.\n"
    yield _line(["", *moments])
    yield _line(["---"] * (1 + len(moments)))
    for fault in faults:
        yield _line([fault, *(cells.get((fault, moment), "") for moment in moments)])


def _place(name):
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER), name)


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
