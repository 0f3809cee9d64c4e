"""The event log of a federated run, for `evenstep report`: a node is a worker, a piece of its work an iteration."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from evenstep.telemetry import SCHEMA, JsonlRecorder
from evenstep.telemetry.events import Ended, IterationDone, Joined, Left, Planned, Run, Tallied


@dataclass(slots=True)
class _Piece:
    """A piece of work: its samples, when it was sent, and what is known of its reply."""

    samples: int
    at: float
    away: float | None = None
    compute: float = 0.0
    stale: int | None = None
    behind: float | None = None


@final
class RunLog:
    """Writes `worker-RANK.jsonl` for each node, by the order in which they came, and `server-0.jsonl`.

    Args:
        folder: The run directory.
        scheme: The name of the scheme.
        samples: The mean samples of a node in a round.
        nodes: The number of nodes at the start.
        clock: The clock, in seconds.

    Raises:
        ConfigError: The folder cannot be written.
    """

    def __init__(self, folder: Path, scheme: str, *, samples: int, nodes: int, clock: Callable[[], float]) -> None:
        self._folder, self._scheme, self._clock = folder, scheme, clock
        self._samples, self._count = samples, max(nodes, 1)
        self._server = JsonlRecorder(folder, 0, role="server")
        self._nodes: dict[int, JsonlRecorder] = {}
        self._ranks: dict[int, int] = {}
        self._here: set[int] = set()
        self._open: dict[int, _Piece] = {}
        self._done: dict[int, int] = {}
        self._sizes: dict[int, int] = {}  # By rank.
        self._version = self._committed = 0
        self._since = clock()

    def sent(self, samples: Mapping[int, int]) -> None:
        """Record that these nodes got work, with its samples; their earlier work ends."""
        now = self._clock()
        for node in samples:
            if node not in self._nodes:
                self._begin(node)
            self._sizes[self._ranks[node]] = samples[node]
        for node in samples:
            if node not in self._here:
                self._here.add(node)
                self._server.record(Joined(at=now, version=self._version, worker=self._ranks[node]))
            self._end(node, now)
            self._open[node] = _Piece(samples[node], now)
            sizes = [self._sizes.get(rank, 0) for rank in range(max(self._count, len(self._ranks)))]
            self._nodes[node].record(
                Planned(worker=self._ranks[node], iteration=self._done.get(node, 0), batch_sizes=sizes)
            )

    def replied(self, node: int, away: float | None, compute: float) -> None:
        """Record a reply: the seconds that the node was away (None: since it was sent), and those of compute."""
        piece = self._open.get(node)
        if piece is not None:
            piece.away = self._clock() - piece.at if away is None else away
            piece.compute = min(compute, piece.away)

    def counted(self, node: int, stale: int, behind: float) -> None:
        """Record that a reply is in the model, and the updates and rounds' worth of updates that it missed."""
        piece = self._open.get(node)
        if piece is not None:
            piece.stale, piece.behind = stale, behind

    def left(self, node: int, why: str) -> None:
        """Record that a node has vanished or failed."""
        if node in self._here:
            self._here.discard(node)
            self._open.pop(node, None)
            self._server.record(Left(at=self._clock(), version=self._version, worker=self._ranks[node], why=why))

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
        for node, recorder in self._nodes.items():
            self._end(node, now)
            recorder.record(Ended(worker=self._ranks[node], at=now))
            recorder.close()
        self._server.close()

    def _begin(self, node: int) -> None:
        rank = self._ranks[node] = len(self._ranks)
        self._nodes[node] = JsonlRecorder(self._folder, rank)
        self._nodes[node].record(
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
                host=f"node {node}",
            )
        )

    def _end(self, node: int, now: float) -> None:
        piece = self._open.pop(node, None)
        if piece is None or piece.away is None:
            return
        number = self._done.get(node, 0)
        self._done[node] = number + 1
        self._nodes[node].record(
            IterationDone(
                worker=self._ranks[node],
                iteration=number,
                at=piece.at,
                samples=piece.samples,
                iteration_seconds=now - piece.at,
                input_seconds=0.0,
                compute_seconds=piece.compute,
                wait_seconds=max(now - piece.at - piece.away, 0.0),
                comm_seconds=max(piece.away - piece.compute, 0.0),
                staleness=piece.stale,
                behind=piece.behind,
            )
        )
