"""The page of promises: each cell of its tables names tests that exist, or says no."""

import re

import pytest
from support.page_blocks import DOCS

PAGE = (DOCS / "guarantees.md").read_text()
TESTS = re.findall(r"\]\((\.\./tests/[^#)]+)#([^)]+)\)", PAGE)
ROWS = [line.strip("|\n ").split(" | ") for line in PAGE.splitlines() if re.match(r"\| [^|]", line)]


@pytest.mark.parametrize(("path", "name"), dict.fromkeys(TESTS))
def test_a_test_that_the_page_names_exists(path, name):
    assert re.search(rf"^def {name}\(", (DOCS / path).read_text(), re.MULTILINE)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_cell_has_a_test_or_says_no(row):
    _, *cells = row
    assert len(cells) in (7, 1)  # Elastic runs have a table of their own.
    assert [cell for cell in cells if "](../tests/" not in cell and not cell.startswith("No")] == []
