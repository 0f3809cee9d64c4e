"""Progress bars, or lines, for runs that are under way, from the events that they write."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import final

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TaskProgressColumn, TextColumn, TimeElapsedColumn

from evenstep.telemetry import RunTail

_POLL_SECONDS = 0.1
_LINES = 4
"""How many lines a run is where no bar can be drawn."""


@contextmanager
def progress_of(console: Console, runs: Mapping[str, Path], epochs: int) -> Iterator[None]:
    """Show how far runs are, each by its title with its run directory, one after the other, until the block ends.

    Where the console is no terminal, each quarter is a line.
    """
    columns = (
        TextColumn("{task.fields[title]:<8}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.description}"),
    )
    ended = threading.Event()
    shown = Progress(
        *columns, TimeElapsedColumn(), console=console, refresh_per_second=4, disable=not console.is_terminal
    )
    with shown as progress:
        bars = [_Bar(progress, title, run_dir, epochs) for title, run_dir in runs.items()]
        lines = [] if console.is_terminal else [_Lines(progress, task) for task in progress.tasks]

        def watch() -> None:
            over = False
            while not over:
                over = ended.wait(_POLL_SECONDS)  # After the end, one look more.
                for bar in bars:
                    bar.look()
                for line in lines:
                    line.look()

        watcher = threading.Thread(target=watch, name="evenstep-progress")
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()


@final
class _Bar:
    """One run: how many of its samples are done."""

    def __init__(self, progress: Progress, title: str, run_dir: Path, epochs: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None, start=False, title=title)
        self._tail = RunTail(run_dir)
        self._epochs = epochs
        self._begun = False

    def look(self) -> None:
        """Take in what has been written since the last look."""
        for role, event in self._tail.new():
            if role == "worker" and event["event"] == "run" and not self._begun:
                self._begun = True
                self._progress.start_task(self._task)
                total = event["iterations_per_epoch"] * event["global_batch_size"] * self._epochs
                self._progress.update(self._task, total=total, description="samples")
            elif event["event"] == "iteration":
                self._progress.advance(self._task, event["samples"])


@final
class _Lines:
    """The same as lines, each of which is printed once."""

    def __init__(self, progress: Progress, task: Task) -> None:
        self._progress = progress
        self._task = task
        self._printed = 0

    def look(self) -> None:
        """Print a line where another part is done."""
        done = int(self._task.percentage * _LINES / 100)
        if done > self._printed:
            self._printed = done
            self._progress.console.print(f"{self._task.fields['title']}: {100 * done // _LINES}% of the samples")
