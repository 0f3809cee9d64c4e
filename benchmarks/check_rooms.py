"""Checks that no room of src/evenstep has more lines than pyproject.toml allows: python benchmarks/check_rooms.py.

A commit that raises a budget says why.
"""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """The exit code: 1 if a room is over its budget, or has none."""
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["evenstep"]["lines"]
    rooms = {path.name: path for path in (ROOT / "src/evenstep").iterdir() if any(path.glob("*.py"))}
    lines = {name: sum(map(_lines, path.rglob("*.py"))) for name, path in rooms.items()}
    trouble = [
        f"src/evenstep/{name} has {count:,} lines, and its budget is {budgets.get(name, 0):,}"
        for name, count in lines.items()
        if count > budgets.get(name, 0)
    ]
    print("\n".join(trouble) or f"{sum(lines.values()):,} lines in {len(lines)} rooms, each within its budget")
    return bool(trouble)


def _lines(path: Path) -> int:
    return path.read_text().count("\n")


if __name__ == "__main__":
    sys.exit(main())
