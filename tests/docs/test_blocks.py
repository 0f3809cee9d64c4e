"""Every block of Python on the pages of docs/ runs, and every command there is one that evenstep has."""

import os
import re
import shlex
from importlib import import_module

import pytest
from support.page_blocks import DOCS, REFUSED, blocks_of
from support.started import Started, evenstep

PAGES = [path.relative_to(DOCS).as_posix() for path in sorted(DOCS.rglob("*.md"))]
OWN = {"frameworks", "integrations"}
"""Their pages have tests of their own, where the frameworks are installed."""
RUNS = {"any-framework.md": ["--workers", "4"], "servers.md": ["--workers", "2", "--scheme", "asp"]}
"""How a page runs that does not run together with the others."""
OTHERS = [page for page in PAGES if page not in RUNS and page.partition("/")[0] not in OWN and blocks_of(page)]
OTHERS.sort(key=lambda page: page != "fsdp.md")  # It starts the process group, which the others then use.


def within(folder, *words):
    os.chdir(folder)
    return evenstep(*words)


@pytest.mark.multiprocess
@pytest.mark.parametrize("pages", [OTHERS, ["any-framework.md"], ["servers.md"]], ids=["others", "any", "servers"])
def test_the_python_of_the_pages_runs(pages, tmp_path):
    options = RUNS.get(pages[0], ["--workers", "2"])
    with Started(within, tmp_path, "run", *options, "-m", "support.page_blocks", *pages) as launcher:
        printed, error = launcher.communicate()
    assert launcher.returncode == 0, error
    for page in pages:
        assert f"{len(blocks_of(page))} blocks of {page} ran" in printed
    assert pages is not OTHERS or REFUSED.keys() <= set(pages)


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
