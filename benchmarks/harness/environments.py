"""Python environments of their own for what cannot live beside evenstep: made once, outside the repository."""

import os
import subprocess
import sys
import venv
from pathlib import Path

DEFAULT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evenstep-benchmarks"
_MADE = "made-from.txt"


def environment(name, requirements, folder=DEFAULT, show=print):
    """The interpreter of an environment with these requirements, in `folder`; RuntimeError where pip cannot make it."""
    # Made for one version of Python: another's is another environment.
    home = Path(folder).expanduser() / f"{name}-{sys.version_info.major}.{sys.version_info.minor}"
    python, made = home / "bin" / "python", home / _MADE
    wanted = "\n".join(requirements) + "\n"
    if made.exists() and made.read_text(encoding="utf-8") == wanted:
        return python
    show(f"making an environment with {', '.join(requirements)} in {home}")
    venv.create(home, clear=True, with_pip=True)
    done = subprocess.run([python, "-m", "pip", "install", "--quiet", *requirements], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"pip could not install {', '.join(requirements)}: {last}")
    made.write_text(wanted, encoding="utf-8")
    return python
