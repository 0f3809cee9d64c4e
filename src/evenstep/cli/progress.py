"""A progress bar for a run that is under way, from the events that it writes."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_LOOK_SECONDS = 0.1


@contextmanager
def progress_of(console: Console, title: str, run_dir: Path, epochs: int) -> Iterator[None]:
    """Show how far the run with this run directory is, until the block ends."""
    columns = (TextColumn(f"{title:<8}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    ended = threading.Event()
    with Progress(*columns, TimeElapsedColumn(), console=console, refresh_per_second=4) as progress:
        task = progress.add_task("starting the workers", total=None)

        def watch() -> None:
            events = _Tail(run_dir / "worker-0.jsonl")
            over = False
            while not over:
                over = ended.wait(_LOOK_SECONDS)  # After the end, one look more.
                for event in events.new():
                    if event["event"] == "run":
                        total = int(event["iterations_per_epoch"]) * epochs  # type: ignore[call-overload]
                        progress.update(task, total=total, description="iterations")
                    elif event["event"] == "iteration":
                        progress.advance(task)

        watcher = threading.Thread(target=watch, name="evenstep-progress")
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()


class _Tail:
    """The events that have come into a file since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> list[dict[str, object]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            lines = file.read().rpartition(b"\n")[0]
        self._offset += len(lines) + 1 if lines else 0
        return [json.loads(line) for line in lines.splitlines()]
