"""The notebook of docs/tutorials runs, and shows what it says that it shows."""

import ast
import json

import pytest
from support.page_blocks import DOCS

NOTEBOOKS = sorted(DOCS.rglob("*.ipynb"))


def shown(cell, space, capsys):
    """What a cell prints, and the picture of its last line if it has one."""
    tree = ast.parse("".join(cell["source"]))
    exec(compile(tree, "cell", "exec"), space)
    printed = capsys.readouterr().out
    last = tree.body[-1]
    value = eval(ast.unparse(last), space) if isinstance(last, ast.Expr) and not printed else None
    return [each for each in (printed, value and value._repr_svg_()) if each]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_cells_show_what_it_says(path, capsys):
    space = {"__name__": "__main__"}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            texts = [each.get("text") or each["data"]["image/svg+xml"] for each in cell["outputs"]]
            assert shown(cell, space, capsys) == ["".join(text) for text in texts]
