"""Cells of elastic runs: a part of them, or with --all-faults all, as `make faults` does."""

import pytest
from support.guard import GUARD_SECONDS

from faults.elastic import check, run_cell
from faults.elastic_cells import elastic_cells, elastic_part

pytest.importorskip("torchft")


def pytest_generate_tests(metafunc):
    cells = elastic_cells()
    if not metafunc.config.getoption("all_faults"):
        cells = elastic_part(cells)
    metafunc.parametrize("cell", cells, ids=str)


@pytest.mark.faults
@pytest.mark.timeout(2 * GUARD_SECONDS)
def test_what_befalls_a_replica_costs_the_others_the_step_in_flight(cell, tmp_path, record_property):
    outcome = run_cell(cell, tmp_path)
    assert check(cell, outcome) == [], outcome.terminal
    record_property("cell", cell.row(outcome.seconds(cell)))
