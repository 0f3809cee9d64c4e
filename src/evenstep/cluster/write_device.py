"""A profiled device as a cluster file, which `parse_cluster` reads."""

from collections.abc import Sequence

from evenstep.cluster.profile import ProfiledMemory, ProfilePoint


def profiled_cluster(
    name: str, points: Sequence[ProfilePoint], memory: ProfiledMemory | None, *, fit_from: int, count: int, heading: str
) -> str:
    """The text of a cluster file with `count` workers on a device of that name.

    Args:
        name: Of the device: letters, digits, - and _.
        points: What was measured, in rising order of size.
        memory: Its memory; None where nothing is known of it.
        fit_from: The size from which its time is taken to grow along a line.
        count: The workers.
        heading: A line of comment.
    """
    measured = ", ".join(f'[{point.samples}, "{point.seconds * 1e3:.4f} ms"]' for point in points)
    lines = [f"# {heading}", f"[devices.{name}]", f"points = [{measured}]", f"fit_from = {fit_from}"]
    if memory is not None:
        lines += [
            f'memory = "{memory.capacity_bytes / 1e6:.0f} MB"',
            f'memory_fixed = "{memory.fixed_bytes / 1e6:.3f} MB"',
            f'memory_per_sample = "{memory.bytes_per_sample / 1e3:.3f} KB"',
        ]
    return "\n".join([*lines, "", "[[workers]]", f'device = "{name}"', f"count = {count}", ""])
