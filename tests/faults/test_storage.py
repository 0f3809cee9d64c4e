"""Cells of the grid in which the storage fails: a part of them, or with --all-faults all, as `make faults` does."""

import time

import pytest
from support.guard import GUARD_SECONDS

from faults.storage import check_cell
from faults.storage_cells import storage_cells, storage_part


def pytest_generate_tests(metafunc):
    cells = storage_cells()
    if not metafunc.config.getoption("all_faults"):
        cells = storage_part(cells)
    metafunc.parametrize("cell", cells, ids=str)


@pytest.mark.faults
@pytest.mark.timeout(2 * GUARD_SECONDS)
def test_a_failing_storage_costs_at_most_what_was_being_saved(cell, tmp_path, record_property):
    began = time.monotonic()
    wrong = check_cell(cell, tmp_path)
    record_property("cell", cell.row(round(time.monotonic() - began, 1)))
    assert wrong == []
