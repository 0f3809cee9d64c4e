"""The command of a run, and the commit that its repository had checked out, for the record."""

import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

_SECRET: Final = re.compile(r"--?[\w-]*(key|token|secret|password)(=|$)", re.IGNORECASE)
"""An option whose value nobody should read in a report, alone or with the value."""


def command() -> str:
    """The script and its arguments, as typed in a shell, with `***` for keys, tokens, secrets and passwords."""
    words, hidden = [Path(sys.argv[0]).name], False
    for word in sys.argv[1:]:
        option = _SECRET.match(word)
        if option is not None:
            word = option[0] + "***" * option[0].endswith("=")
        words.append("***" if hidden and not word.startswith("-") else word)
        hidden = option is not None and not option[2]
    return shlex.join(words).replace("'***'", "***")


def commit_of(folder: Path) -> str:
    """The commit that the git repository around a folder has checked out, 12 digits; empty if there is none.

    Its files say so, without a process of git, which would copy a process that may hold threads and devices.
    """
    with suppress(OSError, ValueError):
        found = next((each / ".git" for each in (folder, *folder.parents) if (each / ".git").exists()), None)
        if found is None:
            return ""
        if found.is_file():  # A worktree or a submodule.
            found = found.parent / found.read_text().removeprefix("gitdir:").strip()
        head = (found / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head[:12]
        name, common = head.removeprefix("ref: "), found / "commondir"
        shared = found / common.read_text().strip() if common.exists() else found
        if (shared / name).exists():
            return (shared / name).read_text().strip()[:12]
        packed = (line.split() for line in (shared / "packed-refs").read_text().splitlines())
        return next((words[0][:12] for words in packed if words[1:] == [name]), "")
    return ""
