"""Every row of the table of tools names a test that exists."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "integrations.md").read_text()
ROWS = re.findall(r"^\| .* \| `(\S+)::(\w+)` \|$", PAGE, re.MULTILINE)


def test_all_rows_have_a_test() -> None:
    table = PAGE.split("| tool | behaviour | test |")[1]
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert len(ROWS) == len(rows) > 40


@pytest.mark.parametrize(("file", "name"), ROWS, ids=[f"{f}::{n}" for f, n in ROWS])
def test_the_test_exists(file: str, name: str) -> None:
    (path,) = TESTS.rglob(file)
    assert f"\ndef {name}(" in path.read_text()
