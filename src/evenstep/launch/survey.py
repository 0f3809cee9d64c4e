"""The measurements of a script by `evenstep plan`: speeds by size, memory, communication and versions."""

import os
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Final, Self

import msgspec

from evenstep.cluster import Cluster, ClusterWorker
from evenstep.cluster.slowness import AffineCurve, Device, PointCurve, Trace
from evenstep.cluster.slowness.devices import TimeCurve
from evenstep.core.errors import ConfigError
from evenstep.core.values import UNLIMITED
from evenstep.telemetry.regular import read_regular

FILE: Final = "survey.json"


class SurveyedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One worker. Samples are average samples where samples differ in cost.

    Attributes:
        worker: Its rank.
        host: The name of its host.
        device: Its device: the name of a GPU, `cpu`, or `emulated`.
        processors: The number of processors that its host lets it use.
        versions: The versions of the packages on its host.
        unix_seconds: The time of its clock when all workers looked at theirs.
        identity: Tells its device from others, in the next run too.
        memory_bytes: The memory that it can have; None if unknown.
        holds: The largest batch that it has computed, in samples.
        more: Whether it might hold more, which was not tried.
        points: Pairs of a size and its seconds of compute, in rising order of size.
        size: Its part of the script's global batch, by speed.
        seconds: Seconds of compute of each iteration with about that size.
        outside_seconds: Mean seconds of an iteration for input and in the script.
    """

    worker: int
    host: str
    device: str
    processors: int
    versions: dict[str, str]
    unix_seconds: float
    identity: str
    memory_bytes: int | None
    holds: int
    more: bool
    points: tuple[tuple[int, float], ...]
    size: int
    seconds: tuple[float, ...]
    outside_seconds: float

    @property
    def samples_per_second(self) -> float:
        """The throughput of compute with the largest batch."""
        samples, seconds = self.points[-1]
        return samples / seconds

    @property
    def full_from(self) -> int:
        """The smallest size with 90 % of the best throughput: larger batches gain little more."""
        best = max(samples / seconds for samples, seconds in self.points)
        return next(samples for samples, seconds in self.points if samples / seconds >= 0.9 * best)

    @property
    def curve(self) -> TimeCurve:
        """The seconds of compute at any size."""
        if len(self.points) == 1:
            return AffineCurve(seconds_per_sample=1 / self.samples_per_second)
        return PointCurve(points=self.points, fit_from=self.full_from)

    @property
    def largest_batch(self) -> int:
        """The largest batch that its memory holds."""
        return UNLIMITED if self.more else self.holds


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """All workers, and their iterations together.

    Attributes:
        workers: The workers, by rank.
        global_batch_size: The script's global batch size, in samples, or a size that fits if it does not.
        length: The number of samples in the data set; 0 if it was not recorded.
        largest_global_batch: The largest, but no more than the data set, whose parts by speed all workers hold.
        by_cost: Whether samples differ in cost; sizes then count average samples.
        iteration_seconds: Median seconds of an iteration with the script's global batch.
        gradient_bytes: The bytes that each worker sends for a sum.
    """

    workers: tuple[SurveyedWorker, ...]
    global_batch_size: int
    largest_global_batch: int
    by_cost: bool
    iteration_seconds: float
    gradient_bytes: int
    length: int = 0

    @property
    def together(self) -> int:
        """The samples that all workers hold together."""
        return sum(each.holds for each in self.workers)

    @property
    def exchange_seconds(self) -> float:
        """The seconds of an iteration besides compute, on all workers alike: communication, and the script."""
        outside = min(each.outside_seconds for each in self.workers)
        beyond = [each.outside_seconds - outside for each in self.workers]
        slowest = [
            max(seconds + other for seconds, other in zip(at, beyond, strict=True))
            for at in zip(*(each.seconds for each in self.workers), strict=True)
        ]
        return max(self.iteration_seconds - median(slowest), 0.0) if slowest else 0.0

    @property
    def cluster(self) -> Cluster:
        """The workers for the simulator, each as slow in every iteration as it was."""
        workers = []
        for each in self.workers:
            usual = each.curve.seconds(each.size)
            varied = tuple(max(seconds, 1e-6) / usual for seconds in each.seconds)  # The resolution of their times.
            device = Device(curve=each.curve, largest_batch=each.largest_batch)
            workers.append(ClusterWorker(device=device, disturbances=(Trace(factors=varied),) if varied else ()))
        return Cluster(workers=tuple(workers))

    @property
    def hosts(self) -> dict[str, list[SurveyedWorker]]:
        """The workers of each host, by its name."""
        hosts: dict[str, list[SurveyedWorker]] = {}
        for each in self.workers:
            hosts.setdefault(each.host, []).append(each)
        return hosts

    def warnings(self) -> Iterator[str]:
        """Yield a sentence for each thing to change on the hosts; none if they fit together."""
        for package in self.workers[0].versions:
            versions: dict[str, list[str]] = {}
            for host, (first, *_) in self.hosts.items():
                versions.setdefault(first.versions.get(package, "missing"), []).append(host)
            if len(versions) > 1:
                told = " and ".join(f"{version} on {', '.join(names)}" for version, names in versions.items())
                yield f"{package} is {told}: install the same everywhere"
        for host, workers in self.hosts.items():
            on_cpu, processors = [each.device for each in workers].count("cpu"), workers[0].processors
            if on_cpu > processors:
                yield (
                    f"{host} runs {on_cpu} workers on {processors} processors, so they take turns: start at most"
                    f" {processors} there"
                )
        first, last = (choose(self.workers, key=lambda each: each.unix_seconds) for choose in (min, max))
        ahead = last.unix_seconds - first.unix_seconds
        if ahead > 1.0:  # Second; messages between hosts take milliseconds.
            yield (
                f"the clock of {last.host} is {ahead:.0f} s ahead of the clock of {first.host}: synchronise them, as"
                " reports compare their times"
            )

    def cluster_file(self, heading: str) -> str:
        """Return the text of a cluster file of these devices, for `parse_cluster`; `heading` is a line of comment."""
        lines = [f"# {heading}", f'gradients = "{self.gradient_bytes / 1e6:.6f} MB"', ""]
        for each in self.workers:
            points = ", ".join(f'[{samples}, "{seconds * 1e3:.4f} ms"]' for samples, seconds in each.points)
            lines += [f"[devices.worker-{each.worker}]  # {each.device}", f"points = [{points}]"]
            lines += [f"fit_from = {each.full_from}", *([] if each.more else [f"largest_batch = {each.holds}"]), ""]
        for each in self.workers:
            lines += ["[[workers]]", f'device = "worker-{each.worker}"']
        return "\n".join([*lines, ""])

    def write(self, folder: Path) -> None:
        """Replace the file in this folder, which is made if necessary."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{FILE}.new"
        path.write_bytes(msgspec.json.encode(self))
        path.replace(folder / FILE)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read the file in this folder; None if there is no file.

        Raises:
            ConfigError: The file is damaged.
        """
        path = folder / FILE
        if not os.path.exists(path):
            return None
        try:
            return msgspec.json.decode(read_regular(path), type=cls)
        except (OSError, ValueError) as error:  # A DecodeError is a ValueError.
            raise ConfigError(f"{path} cannot be read ({error}): measure again with evenstep plan") from error

    def holds_of(self, identity: str) -> int | None:
        """Return the largest batch that the worker of this identity holds; None if there is none."""
        return next((each.holds for each in self.workers if each.identity == identity), None)
