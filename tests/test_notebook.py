"""The tutorial runs from beginning to end, in an empty folder."""

from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs" / "tutorial.ipynb"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_tutorial_runs(tmp_path: Path) -> None:
    client = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    run = client.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tmp_path}})
    run.execute()
    printed = [_text(cell) for cell in notebook.cells if cell.cell_type == "code"]
    assert "connections" in printed[1]
    assert "tried so far" in printed[3]
    assert "after" in printed[4]


def _text(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def test_the_tutorial_is_stored_without_outputs() -> None:
    assert '"outputs": []' in NOTEBOOK.read_text()
    assert '"output_type"' not in NOTEBOOK.read_text()


def test_the_code_of_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is no Jupyter."""
    import json

    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]).replace("epochs=4", "epochs=2"), names)
