"""Every block of Python on the pages of docs/ runs, and every command there is one that evenstep has."""

import re
import shlex
import subprocess
import sys
from importlib import import_module

import pytest
from support.guard import GUARD_SECONDS
from support.page_blocks import DOCS, blocks_of

PAGES = [path.relative_to(DOCS).as_posix() for path in sorted(DOCS.rglob("*.md"))]
OWN = {"frameworks", "integrations"}
"""Their pages have tests of their own, where the frameworks are installed."""
REFUSED = "schemes/batch-sizes.md"
RUNS = {
    "any-framework.md": ["--workers", "4"],
    "servers.md": ["--workers", "2", "--scheme", "asp"],
    REFUSED: ["--workers", "2"],
}
"""How a page runs that does not run together with the others."""
OTHERS = [page for page in PAGES if page not in RUNS and page.partition("/")[0] not in OWN and blocks_of(page)]
OTHERS.sort(key=lambda page: page != "fsdp.md")  # It starts the process group, which the others then use.


def ran(folder, options, *pages):
    command = [sys.executable, "-m", "evenstep", "run", *options, "-m", "support.page_blocks", *pages]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=GUARD_SECONDS)


@pytest.mark.multiprocess
@pytest.mark.parametrize("pages", [OTHERS, ["any-framework.md"], ["servers.md"]], ids=["others", "any", "servers"])
def test_the_python_of_the_pages_runs(pages, tmp_path):
    done = ran(tmp_path, RUNS.get(pages[0], ["--workers", "2"]), *pages)
    assert done.returncode == 0, done.stderr
    for page in pages:
        assert f"{len(blocks_of(page))} blocks of {page} ran" in done.stdout


@pytest.mark.multiprocess
def test_a_device_that_no_worker_has_is_named(tmp_path):
    assert "gpu:NVIDIA GeForce RTX 3090" in ran(tmp_path, RUNS[REFUSED], REFUSED).stderr


def commands():
    """`(page, words)` of each command of evenstep in a block of a shell."""
    for page in PAGES:
        for block in re.findall(r"^ *```(?:sh|console)\n(.*?)```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines():
                if found := re.match(r"\s*(?:\$ )?evenstep (.*)", line):
                    words = shlex.split(found[1].partition("#")[0])
                    yield page, words[: words.index(">")] if ">" in words else words


@pytest.mark.parametrize(
    ("page", "words"), list(commands()), ids=lambda value: value if isinstance(value, str) else value[0]
)
def test_a_command_of_a_page_is_understood(page, words):
    name, *rest = words
    subcommand = import_module(f"evenstep.cli.{name}")
    subcommand.parse(rest) if name in ("run", "plan") else subcommand.make_parser().parse(rest)
