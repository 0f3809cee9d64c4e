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
# If a worker is lost

The worker that died, hangs or was stopped is named on the terminal, and nobody waits for it for ever. The others:

| your run | the others | what to do |
| --- | --- | --- |
| `lb-bsp`, `dbs`, `bsp`, fixed sizes, `local-sgd`, `diloco` | end with an error that names the worker | start again \
from a [checkpoint](checkpoints.md#when-a-worker-dies), or let `evenstep run --max-restarts` do it |
| `asp`, `ssp`, `dssp`, `grouped`, on [servers](servers.md) | train on, and take its samples; before the first \
iteration the launcher ends the run | nothing; `torchrun` ends the run if a worker dies |
| the same, and a server dies or stops | wait until it has started again from its last snapshot; \
the log says how many commits that lost | nothing |
| several hosts, and the network between two of them is cut | without servers: as above. On servers: those on the host \
of the servers train on. A cut of a few seconds ends no run | as above |
| [`evenstep run --elastic`](elastic.md) | lose at most the step (or period) in flight, and train on | nothing; \
if the first host dies, run its command again |
| JAX, TensorFlow, MXNet | are ended by `evenstep run`; under another launcher see [MXNet](frameworks/mxnet.md) | \
start again from your checkpoint |
| [Flower](integrations/flower.md) | do its work | nothing |

A dead worker is noticed in seconds. One that is stopped by a signal is given up after `--heartbeat` (20 s), and one
that hangs after `--timeout` (300 s).

## How it is tested

`make faults` makes the tables below. Each cell is a run of {COUNT} real processes in which the fault takes place. It is
checked that it did, that nobody waits for ever, that the lost worker is named, that each sample of an epoch counted
once, and that no process, file or shared memory is left behind.

| fault | how |
| --- | --- |
| killed | SIGKILL |
| stopped | SIGSTOP |
| paused | SIGSTOP, and SIGCONT after 3 s |
| raises | an exception in the script |
| exits | `sys.exit(0)` on worker 0, `os._exit(0)` on another |
| hangs | the main thread waits for ever, the other threads run |
| out of memory | the device's memory is exhausted |
| another model | a weight of another shape on worker 1 |
| other data | the same samples in another order on worker 1 |
| NaN | in the gradient of worker 1, which is left out with a warning |
| NaN refused | the same with `nonfinite=refuse` |

| outcome | the workers without a fault |
| --- | --- |
| finish | train to the end; so does the victim if it can come back |
| fail | end with an error that names the victim |
| stopped | are ended by the launcher, which names the victim |
| refused | get an error from `prepare` that names the victim |

Seconds are from the fault to the end of the run, on a machine that ran several cells at a time. `--heartbeat` is 4 (20
behind a barrier where a worker is paused). `timeout` is 8 where a worker has to be waited for (30 under a launcher),
and 60 elsewhere: without a launcher, a worker that ends before `prepare` is missed only after that. In the first four
tables a cell is the slower of two runs, one with the fault on worker 0 and one on worker {COUNT - 1}.
"""

_STORAGE_INTRO = """\
A save that fails leaves the checkpoint before it intact, and no file of yours is touched. The save raises an error of
one sentence; a script that catches it trains on. Servers train on by themselves.

Here `lb-bsp` on two workers saves checkpoints, at once or while training goes on, and restores them; two servers do the
same with their snapshots. One operation on a file fails: ENOSPC (full), EROFS until the save is over (read-only),
EACCES for a second, or a file that is cut short or has a bit flipped. Then the run starts again from what there
is, and its last weights are compared with an undisturbed run's.
"""


_UNDER_RUN = """\
Faults and outcomes are those [above](#how-it-is-tested), on worker 1 of three under `evenstep run` with
`--heartbeat 2`, and `--timeout 20` where it hangs and at the start. In the last four rows, seconds are from before
`prepare`.
"""
_UNDER_FLOWER = """\
One of three nodes fails in its second piece of work, under `LoadBalanced` with `patience=1.5` (with rounds) or under
`Asynchronous` with `ssp:bound=1` and `timeout=20` (without rounds). The log names the node, the other nodes do the
work, and training ends after all of it (**finish**).

| fault | how |
| --- | --- |
| killed, stopped | the SuperNode and its app |
| raises, exits, hangs | the app |
| another model | a reply with arrays of another shape |
| NaN | a reply with NaNs |
| lies | a reply that says that it took 1e9 s; without rounds nothing depends on it |
"""
_ELASTIC = """\
Three replicas under `evenstep run --elastic 1:3`, with `--heartbeat 4` and `--timeout 10` (5 where two hang and where
the link is cut for good, 30 where the Lighthouse is killed). Rows about links and the Lighthouse have two hosts, with
one replica on the second. The others **finish**, and so does the victim if it is started again, goes on, or is reached
again. It is checked that each lost at most the step in flight, that no sample counted twice, that the last weights are
one process's to 1e-10, and that the terminal says who was lost and why. Seconds are from the fault to the next step
that counted: a stopped replica is ended after `--heartbeat`, and two that hang once the third has waited for six times
`--timeout`. The machine ran other tests at the same time.

| moment | when |
| --- | --- |
| first iteration, mid-epoch | in the script, between a batch and its backward |
| commit | the victim knows that the step counts, and has not stepped yet |
| joins | the victim is about to use the state that it received |
| sends | the victim is about to send its state to a replica that joins |
| period | in the second of three iterations under `local-sgd:period=3`; the others lose at most the period in flight |

| fault | how |
| --- | --- |
| link cut | on the side of the second host, for 3 s or for good; then `evenstep run` ends there with an error |
| rank 0 of two, rank 1 of two | one process of a replica, with `--nproc-per-replica 2` and tensor parallelism |
| Lighthouse killed | `evenstep run` on the first host, with its replicas; then the same command again |
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
    yield _line(["moment", "faults", "outcome"])
    yield _line(["---"] * 3)
    alike = defaultdict(list)
    for launcher, _, moment, what, outcome, _ in rows:
        if launcher == STORAGE:
            alike[moment, outcome].append(what)
    for (moment, outcome), faults in alike.items():
        yield _line([moment, ", ".join(faults), outcome])
    yield ""


def _line(cells):
    return f"| {' | '.join(cells)} |"
