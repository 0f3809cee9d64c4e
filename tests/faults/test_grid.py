"""Cells of the grid of faults: a part of them, or with --all-faults all, as `make faults` does."""

import pytest
from support.guard import GUARD_SECONDS

from faults.cells import forked_cells, launched_cells, link_cells, part, server_cells
from faults.grid import check, run_cell


def pytest_generate_tests(metafunc):
    cells = [*forked_cells(), *launched_cells(), *server_cells(), *link_cells()]
    if not metafunc.config.getoption("all_faults"):
        cells = part(cells)
    metafunc.parametrize("cell", cells, ids=str)


@pytest.mark.faults
@pytest.mark.timeout(2 * GUARD_SECONDS)
def test_what_befalls_one_worker_is_told_and_costs_nothing_but_its_time(cell, tmp_path, record_property):
    outcome = run_cell(cell, tmp_path)
    record_property("cell", cell.row(outcome.seconds))
    assert check(cell, outcome) == [], outcome.terminal
