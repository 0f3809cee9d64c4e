"""What `evenstep run --find-batch` has found, as a table and what to do with it."""

import argparse
import json

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from evenstep.core.errors import ConfigError
from evenstep.launch.found_batch import FoundBatch


def show_found(found: FoundBatch | None, options: argparse.Namespace) -> None:
    """Print what was found, and how to use it."""
    if found is None:
        raise ConfigError(
            f"{options.training_script} ended before the largest batches were found: it must call evenstep.prepare and"
            " train on the loader that it returns, for long enough"
        )
    if options.json:
        print(json.dumps(msgspec.to_builtins(found)))
        return
    Console(highlight=False).print(_table(found))
    size, unit = found.global_batch_size, "average samples" if found.by_cost else "samples"
    more = any(each.more for each in found.workers)
    fits, together = ("fits", f"{found.together} or more") if more else ("uses every device fully", found.together)
    print(f"a global batch of {size} {unit} {fits}, with sizes by speed; all hold {together}")
    if options.run_dir is None:
        print(
            f"for the next start: evenstep.prepare(..., global_batch_size={size}), or --run-dir to keep what was found"
        )
    else:
        print(f'for the next start with --run-dir {options.run_dir}: evenstep.prepare(..., global_batch_size="auto")')


def _table(found: FoundBatch) -> Table:
    """A row for each worker: its device, the largest batch that it holds, and its speed with that."""
    table = Table(box=box.SIMPLE_HEAD)
    unit = "average samples" if found.by_cost else "samples"
    for heading in ("worker", "device", "memory", f"holds, {unit}", f"{unit}/s"):
        table.add_column(heading, justify="left" if heading == "device" else "right")
    for each in found.workers:
        table.add_row(
            str(each.worker),
            each.device,
            "" if each.memory_bytes is None else f"{each.memory_bytes / 1e9:,.1f} GB",
            f"{each.holds:,}{' or more' if each.more else ''}",
            f"{each.samples_per_second:,.1f}",
        )
    return table
