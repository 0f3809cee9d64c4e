"""The event log of a federated run, for `evenstep report`: a node is a worker, a piece of its work an iteration."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from evenstep.telemetry import SCHEMA, JsonlRecorder, Recorder, Silent
from evenstep.telemetry.events import Ended, IterationDone, Joined, Left, Planned, Run, Tallied


@dataclass(slots=True)
class _Node:
    """A node: its newest piece of work (samples, when it was sent), the known facts about the reply, pieces `done`."""

    rank: int
    recorder: Recorder
    here: bool = False
    open: bool = False
    done: int = 0
    samples: int = 0
    at: float = 0.0
    away: float | None = None
    compute: float = 0.0
    stale: int | None = None
    behind: float | None = None


@final
class RunLog:
    """Writes `worker-RANK.jsonl` for each node, with ranks in order of arrival, and `server-0.jsonl`.

    Args:
        folder: The run directory; None: nothing is written.
        scheme: The name of the scheme.
        samples: The mean samples of a node in a round.
        nodes: The number of nodes at the start.
        clock: The clock, in seconds.

    Raises:
        ConfigError: The folder cannot be written.
    """

    def __init__(
        self, folder: Path | None, scheme: str, *, samples: int, nodes: int, clock: Callable[[], float]
    ) -> None:
        self._folder, self._scheme, self._clock = folder, scheme, clock
        self._samples, self._count = samples, max(nodes, 1)
        self._server: Recorder = Silent() if folder is None else JsonlRecorder(folder, 0, role="server")
        self._nodes: dict[int, _Node] = {}  # In the order of their ranks.
        self._version = self._committed = 0
        self._since = clock()

    def sent(self, samples: Mapping[int, int]) -> None:
        """Record that these nodes got work, with its samples; their earlier work ends."""
        now = self._clock()
        for name in samples:
            if name not in self._nodes:
                self._begin(name)
        sizes = [0] * max(self._count, len(self._nodes))
        for name, node in self._nodes.items():
            sizes[node.rank] = samples.get(name, node.samples)
        for name, size in samples.items():
            node = self._nodes[name]
            if not node.here:
                self._server.record(Joined(at=now, version=self._version, worker=node.rank))
            self._end(node, now)
            node.here = node.open = True
            node.samples, node.at, node.compute = size, now, 0.0
            node.away = node.stale = node.behind = None
            node.recorder.record(Planned(worker=node.rank, iteration=node.done, batch_sizes=sizes))

    def replied(self, name: int, away: float | None, compute: float) -> None:
        """Record a reply: the seconds that the node was away (None: since it was sent), and the compute seconds."""
        if (node := self._nodes.get(name)) is not None and node.open:
            node.away = self._clock() - node.at if away is None else away
            node.compute = min(compute, node.away)

    def counted(self, name: int, stale: int, behind: float) -> None:
        """Record that a reply is in the model, and how many updates, and rounds' worth of updates, it missed."""
        if (node := self._nodes.get(name)) is not None:
            node.stale, node.behind = stale, behind

    def left(self, name: int, why: str) -> None:
        """Record that a node has vanished or failed."""
        if (node := self._nodes.get(name)) is not None and node.here:
            node.here = node.open = False
            self._server.record(Left(at=self._clock(), version=self._version, worker=node.rank, why=why))

    def updated(self, samples: int) -> None:
        """Record an update of the model, with the samples of its replies."""
        now = self._clock()
        self._version += 1
        self._committed += samples
        self._server.record(
            Tallied(
                at=now,
                version=self._version,
                seconds=max(now - self._since, 0.0),
                commits=1,
                bytes=0,
                samples=self._committed,
            )
        )
        self._since = now

    def close(self) -> None:
        """Record the end of the run."""
        now = self._clock()
        for node in self._nodes.values():
            self._end(node, now)
            node.recorder.record(Ended(worker=node.rank, at=now))
            node.recorder.close()
        self._server.close()

    def _begin(self, name: int) -> None:
        rank = len(self._nodes)
        recorder: Recorder = Silent() if self._folder is None else JsonlRecorder(self._folder, rank)
        self._nodes[name] = _Node(rank, recorder)
        recorder.record(
            Run(
                worker=rank,
                at=self._clock(),
                schema=SCHEMA,
                unix_seconds=time.time(),
                workers=max(self._count, rank + 1),
                scheme=self._scheme,
                engine="server",
                global_batch_size=self._samples * self._count,
                iterations_per_epoch=1,
                host=f"node {name}",
            )
        )

    def _end(self, node: _Node, now: float) -> None:
        if not node.open or node.away is None:
            return
        node.recorder.record(
            IterationDone(
                worker=node.rank,
                iteration=node.done,
                at=node.at,
                samples=node.samples,
                iteration_seconds=now - node.at,
                input_seconds=0.0,
                compute_seconds=node.compute,
                wait_seconds=max(now - node.at - node.away, 0.0),
                comm_seconds=max(node.away - node.compute, 0.0),
                staleness=node.stale,
                behind=node.behind,
            )
        )
        node.done += 1
