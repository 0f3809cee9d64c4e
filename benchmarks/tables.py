"""Writes RESULTS.md from the JSON in results/, so that no figure is typed by hand."""

import json

from harness import record

ORDER = (
    "steady-4", "steady-8", "steady-16", "gpu_curves", "frameworks", "equal_workers", "overhead-small",
    "overhead-large", "overhead-huge", "change", "load_schemes",
    "dbs_fixed_point", "updates_to_target", "planning",
    "small_sums", "exchange", "served_schemes-4", "server_memory",
)  # fmt: skip
HEADINGS = ("figure", "median", "least to largest", "goal", "met")


def main():
    records = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in record.RESULTS.glob("*.json")}
    names = [name for name in ORDER if name in records] + sorted(set(records) - set(ORDER))
    parts = [
        "# Results\n",
        "Written by `python benchmarks/tables.py` from the JSON files in `results/`, which hold every repetition, the",
        "configuration and the versions. What each case shows: `README.md`.\n",
    ]
    for name in names:
        parts += _section(name, records[name])
    path = record.RESULTS.parent / "RESULTS.md"
    path.write_text("\n".join(parts), encoding="utf-8")
    record.console.print(f"written: {path.name}, {len(names)} cases")


def _section(name, run):
    environment = run["environment"]
    commit = (environment["git_commit"] or "unknown")[:12] + (" with changes" if environment["git_changes"] else "")
    lines = [
        f"## {run['title']}\n",
        f"`{run['command']}` ([results/{name}.json](results/{name}.json)): commit {commit}, Python"
        f" {environment['python']}, torch {environment['torch']}, numpy {environment['numpy']},"
        f" {environment['cpu_count']} CPU cores, seed {run['seed']}.\n",
        *_table(HEADINGS, map(record.row, run["figures"])),
    ]
    # Records from before there were tables have none.
    for each in run.get("tables", ()):
        lines += [each["title"] + ":\n", *_table(each["headings"], each["rows"])]
    if run["overruns"] is not None:
        lines.append(record.verdict(run["overruns"]) + "\n")
    return lines


def _table(headings, rows):
    return [
        "| " + " | ".join(headings) + " |",
        "|" + "|".join(["---"] + ["---:"] * (len(headings) - 1)) + "|",
        *("| " + " | ".join(cells) + " |" for cells in rows),
        "",
    ]


if __name__ == "__main__":
    main()
