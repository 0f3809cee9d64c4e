"""Timed segments of training on parameter servers and emulated devices, one after another in the same processes.

Every segment has a server process of its own, and a fresh model, optimizer and loader. Its time runs from a barrier;
its epoch does not end before the segment, so that no tail of an epoch counts.
"""

import tempfile
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep.cluster import Cluster
from harness.serving import served
from harness.track import Track
from harness.workers import run_workers

FEATURES, CLASSES = 16, 10
_LENGTH = 10**6


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One scheme on one cluster for so many seconds."""

    name: str
    scheme: str
    cluster: Cluster
    global_batch_size: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What all workers did: their tracks, and how many of all iterations overran their emulated time."""

    tracks: list[Track]
    overruns: int

    @property
    def iterations(self):
        """Of all workers."""
        return sum(len(track.ended) for track in self.tracks)


def run(segments, seed, show=print):
    """A `Ran` for each segment, in their order; all have as many workers."""
    return run_workers(len(segments[0].cluster), _all, (segments, seed), show)


def _all(rank, plan, tell):
    segments, seed = plan
    done = []
    for number, segment in enumerate(segments, start=1):
        done.append(_segment(rank, segment, seed))
        tell(
            f"  {number}/{len(segments)} {segment.name}: {done[-1].iterations} iterations in {segment.seconds:.1f} s,"
            f" overrun in {done[-1].overruns}"
        )
    return done


def _segment(rank, segment, seed):
    with tempfile.TemporaryDirectory() as folder, served(segment.scheme, folder):
        traces = [None] * dist.get_world_size()
        dist.all_gather_object(traces, _train(rank, segment, seed))
    dist.barrier()
    return Ran(tracks=[track for track, _ in traces], overruns=sum(overruns for _, overruns in traces))


def _train(rank, segment, seed):
    """This worker's track, times counted from the barrier, and its overruns."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(FEATURES, CLASSES)
    # An epoch of many samples that take the room of one.
    inputs, targets = torch.randn(1, FEATURES), torch.zeros(1, dtype=torch.int64)
    source = DataLoader(
        TensorDataset(inputs.expand(_LENGTH, FEATURES), targets.expand(_LENGTH)), batch_size=1, shuffle=False
    )
    model, optimizer, loader = evenstep.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        source,
        scheme=segment.scheme,
        global_batch_size=segment.global_batch_size,
        seed=seed,
        emulate=segment.cluster,
    )
    disturbance, track = segment.cluster.disturbance(), Track()
    dist.barrier()
    began = time.perf_counter()
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        now = time.perf_counter() - began
        compute = disturbance.seconds(worker=rank, iteration=len(track.ended), batch_size=len(x), natural_seconds=0.0)
        track.add(now, len(x), compute)
        if now >= segment.seconds:
            break
    overruns = loader.statistics().overruns
    # A script prepares once and ends; here the connection of one segment must not live on in the next.
    dist.barrier()
    loader.close()
    return track, overruns
