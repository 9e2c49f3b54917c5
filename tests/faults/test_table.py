"""docs/reliability.md has a row for each fault that is tried, with the number of its cases."""

from pathlib import Path

import pytest
from reliability import FILES, PAGE, ROWS, with_table


def test_the_table_of_the_page_is_that_of_the_tests(request: pytest.FixtureRequest) -> None:
    if not {*Path(__file__).parent.glob("test_*.py")} <= request.config.stash[FILES]:
        pytest.skip("needs all tests of tests/faults")
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page, request.config.stash[ROWS]) == page
