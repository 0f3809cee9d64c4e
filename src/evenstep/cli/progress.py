"""Progress bars, or lines, for runs that are under way, from the events that they write."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from evenstep.telemetry import RunTail
from evenstep.telemetry.events import IterationDone, Run

_POLL_SECONDS = 0.1
_LINES = 4
"""Number of lines for each run if no bar can be drawn."""


@contextmanager
def progress_of(console: Console, runs: Mapping[str, Path], epochs: int) -> Iterator[None]:
    """Show the progress of runs, which are given as title and run directory, until the block ends.

    If the console is no terminal, each quarter of a run is a line.
    """
    columns = (TextColumn("{task.fields[title]:<8}"), BarColumn(), TaskProgressColumn())
    ended = threading.Event()
    with Progress(
        *columns,
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        refresh_per_second=4,
        disable=not console.is_terminal,
    ) as progress:
        bars = [_Bar(progress, title, run_dir, epochs) for title, run_dir in runs.items()]

        def watch() -> None:
            over = False
            while not over:
                over = ended.wait(_POLL_SECONDS)  # After the end, one look more.
                for bar in bars:
                    bar.look()

        watcher = threading.Thread(target=watch, name="evenstep-progress")
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()


@final
class _Bar:
    """One run: how many of its samples are done, as a bar or as lines."""

    def __init__(self, progress: Progress, title: str, run_dir: Path, epochs: int) -> None:
        self._progress = progress
        self._title = title
        self._id = progress.add_task("", total=None, start=False, title=title)
        (self._task,) = (task for task in progress.tasks if task.id == self._id)
        self._tail = RunTail(run_dir)
        self._epochs = epochs
        self._printed = 0

    def look(self) -> None:
        """Show what has been written since the last look."""
        for event in self._tail.new():
            if isinstance(event, Run) and self._task.total is None:
                self._progress.start_task(self._id)
                total = event.iterations_per_epoch * event.global_batch_size * self._epochs
                self._progress.update(self._id, total=total, description="samples")
            elif isinstance(event, IterationDone):
                self._progress.advance(self._id, event.samples)
        done = int(self._task.percentage * _LINES / 100)
        if done > self._printed and not self._progress.console.is_terminal:
            self._printed = done
            self._progress.console.print(f"{self._title}: {100 * done // _LINES}% of the samples")
