"""Whether the figures in README.md and docs/ come from records of the present code: a part of `make check`.

It fails for a record that a document links to if its commit is not in the history of HEAD, if what it judges
(harness/judges.py) has changed since, or if that was being changed when it was made. known_old.toml excuses records,
each with the reason.
"""

import json
import sys
import tomllib
from pathlib import Path

from harness.changed import JUDGES, changed, git, judged

SHOWN = 3
"""Changed files that are named; `git diff COMMIT` shows the others."""


def main():
    shown, wrong = check(Path(__file__).parents[1])
    print(*shown, *wrong, sep="\n")
    return int(bool(wrong))


def check(root):
    """What is to be said, and what fails the check, as two lists of sentences."""
    pages = [root / "README.md", *(root / "docs").rglob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    excuses = tomllib.loads((root / "benchmarks/known_old.toml").read_text(encoding="utf-8"))
    complete = git(root, "rev-parse", "--is-shallow-repository") == "false"
    shown, wrong, unknown, unquoted = [], [], [], []
    for path in sorted((root / "benchmarks/results").glob("*.json")):
        name, run = path.stem, json.loads(path.read_text(encoding="utf-8"))
        excuse = excuses.pop(name, None)
        if not complete and not _in_history(root, run["environment"]["git_commit"]):
            unknown.append(name)
            continue
        problem = _problem(root, run)
        if f"results/{path.name}" not in text:
            unquoted.append(f"{name}, {problem}" if problem else name)
            problem = None
        if problem and excuse:
            shown.append(f"{name}: {problem}: {excuse}")
        elif problem:
            wrong.append(f"{name}: {problem}: measure it anew, or say in benchmarks/known_old.toml why it is right")
        elif excuse:
            wrong.append(f"{name}: nothing to excuse: take it out of benchmarks/known_old.toml")
    wrong += [f"{name}: no such record: take it out of benchmarks/known_old.toml" for name in excuses]
    paths = sorted({path for script in JUDGES for path in judged(root, script) if not (root / path).exists()})
    wrong += [f"{path}: no such path: correct benchmarks/harness/judges.py" for path in paths]
    shown += [f"warning: no document quotes {each}" for each in unquoted]
    if unknown:
        shown.append(f"{len(unknown)} records are not checked: this clone lacks the history with their commits.")
    return shown, wrong


def _problem(root, run):
    commit = run["environment"]["git_commit"]
    if not _in_history(root, commit):
        return "its commit is not in the history of HEAD"
    paths = changed(root, commit, Path(run["command"].split()[1]).stem)
    if paths:
        more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
        return f"older than {', '.join(paths[:SHOWN])}{more}"
    return "made with uncommitted changes" if run["environment"]["git_changes"] else None


def _in_history(root, commit):
    return commit is not None and git(root, "merge-base", "--is-ancestor", commit, "HEAD") is not None


if __name__ == "__main__":
    sys.exit(main())
