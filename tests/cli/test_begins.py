"""A run that continues from a saved state begins with the batch sizes that it had."""

import json
from pathlib import Path

import pytest

from evenstep.cli.main import main

pytestmark = pytest.mark.multiprocess

SCRIPT = Path(__file__).parent / "scripts" / "begins.py"
BALANCED = [18, 6]


def test_a_state_begins_with_the_sizes_that_it_holds(tmp_path):
    for _ in range(2):
        assert main(["run", "--workers", "2", str(SCRIPT), str(tmp_path)]) == 0
    sizes = [json.loads(line) for line in (tmp_path / "worker-0.jsonl").read_text().splitlines()]
    assert len(sizes) == 15 + 5  # The rest of the epoch.
    assert sizes[0] == [12, 12]
    assert sizes[14] == sizes[15] == BALANCED
