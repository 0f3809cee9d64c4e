from runpy import run_path

import pytest
from support.page_blocks import DOCS

IMAGES = DOCS / "images"


NAMES = ["bsp", "lb-bsp", "dbs", "local-sgd", "diloco", "asp", "ssp", "dssp", "grouped", "periods"]


@pytest.mark.parametrize("name", NAMES)
def test_the_picture_of_a_scheme_is_what_the_simulator_does(name, monkeypatch):
    monkeypatch.syspath_prepend(IMAGES)
    drawn = run_path(str(IMAGES / "schemes.py"))["drawn"]
    assert drawn(name) == (IMAGES / f"{name}.svg").read_text(), "python docs/images/schemes.py draws them again"
