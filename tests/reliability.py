"""The table of docs/reliability.md. Each test of tests/faults names its row by the marker `fault`;
`pytest tests/faults --collect-only --write-reliability` writes the table from them."""

import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs/reliability.md"
BEGIN, END = "<!-- The table of faults begins. -->\n", "<!-- The table of faults ends. -->\n"
HEADING = "| fault | what happens, and what is kept | exit status | cases |\n|---|---|---|---|\n"


@dataclass(frozen=True, order=True)
class Row:
    """A row of the table: what went wrong, what the command does and keeps, its exit status."""

    fault: str
    kept: str
    status: str


ROWS = pytest.StashKey[Counter[Row]]()  # of all tests that were collected, selected or not
FILES = pytest.StashKey[set[Path]]()  # the files of these tests


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-reliability",
        action="store_true",
        help="write the table of docs/reliability.md from the tests that are collected",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before any is deselected."""
    marks = [mark for item in items if (mark := item.get_closest_marker("fault"))]
    config.stash[FILES] = {item.path for item in items}
    config.stash[ROWS] = Counter(Row(*mark.args, **mark.kwargs) for mark in marks)
    if config.getoption("--write-reliability"):
        PAGE.write_text(with_table(PAGE.read_text(), config.stash[ROWS]))


@pytest.fixture(autouse=True, scope="session")
def _signals_reach_children() -> None:
    """A shell starts what runs in the background with SIGINT ignored, and nohup with SIGHUP; the
    commands under test would inherit that."""
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(run directory, text) of the run that nothing interrupts."""
    from tiny_run import reference  # with it comes JAX

    return reference(tmp_path_factory)


def with_table(page: str, rows: Counter[Row]) -> str:
    """The page with these rows as its table."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = [
        f"| {row.fault} | {row.kept} | {row.status} | {count} |\n"
        for row, count in sorted(rows.items())
    ]
    return before + BEGIN + HEADING + "".join(lines) + END + after
