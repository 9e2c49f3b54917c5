"""Each measure of `figures.py` on a package that is small enough to know the answer."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import dedent

import figures
import pytest
from package_source import Package
from settings_walk import SettingsWalk

Write = Callable[..., Package]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes files of a package `jaxformer`; each of its folders gets an empty `__init__.py`."""

    def write_files(files: Mapping[str, str], checkout: str = "now") -> Package:
        for name, text in {"__init__.py": "", **files}.items():
            path = tmp_path / checkout / "jaxformer" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            text = dedent(text[1:]) if text.startswith("\n ") else text
            path.write_text(text, encoding="utf-8")
            (path.parent / "__init__.py").touch()
        return Package.read(tmp_path / checkout)

    return write_files


SETTINGS = """
    class RunConfig:
        steps: int
    class RunSetup:
        run: RunConfig
        mesh: int
        def length(self, step):
            return self.run.steps
"""


def test_a_folder_without_the_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"is no checkout: it has no jaxformer/__init__\.py"
    ):
        Package.read(tmp_path)


def test_entries_at_the_top_leave_out_caches_and_the_stub(write: Write) -> None:
    package = write(
        {"a.py": "", "files.py": "", "layers/b.py": "", "__init__.pyi": "", "t.html": ""}
    )
    (package.root / "jaxformer/__pycache__").mkdir()
    assert figures.top_entries(package) == ["__init__.py", "a.py", "files.py", "layers", "t.html"]
    assert figures.loose_files(package) == ["a.py"]


def test_the_walk_counts_reads_and_calls_in_the_order_of_the_source(write: Write) -> None:
    package = write(
        {
            "settings.py": SETTINGS,
            "run.py": """
                from jaxformer.settings import RunConfig
                def train(run: RunConfig):
                    from jaxformer import checks
                    checks.check(run)       # 1: run
                    limit = run.steps       # 3: run, after 2 in checks
                    check(limit)
                    return other(limit)
            """,
            "checks.py": """
                def check(settings):
                    return settings.steps   # 2: checks
            """,
        }
    )
    walk = SettingsWalk(package)
    assert [(event.module.name, event.line) for event in walk.events] == [
        ("jaxformer.run", 4),
        ("jaxformer.checks", 2),
        ("jaxformer.run", 5),
    ]
    assert walk.files == ["jaxformer.run", "jaxformer.checks"]
    assert walk.stays == ["jaxformer.run", "jaxformer.checks", "jaxformer.run"]
    assert walk.climbs == [("jaxformer.checks", "jaxformer.run")]
    assert len(SettingsWalk(package, limit=2).events) == 2


def test_the_walk_follows_what_calls_return_and_what_carries_the_settings(write: Write) -> None:
    package = write(
        {
            "settings.py": SETTINGS,
            "run.py": """
                import dataclasses
                from jaxformer.settings import RunConfig
                from jaxformer.setup import make, twice
                def train(run: RunConfig):
                    run, name = dataclasses.replace(run, steps=2), ""  # 1
                    setup = twice(lambda: make(name, run=run))         # 2 and 3
                    setup.length(0)                                    # 4, and 5 in settings
                    setup.mesh
                    first, run = both(setup)                           # 6
                    first.steps
                    return run.steps                                   # 7
                def both(setup) -> tuple[int, "RunConfig"]:
                    ...
            """,
            "setup.py": """
                from typing import TypeVar
                from jaxformer.settings import RunSetup
                MadeT = TypeVar("MadeT")
                def twice(work) -> MadeT:
                    return work()
                def make(name, run) -> RunSetup:
                    return RunSetup(run, 1)                            # between 2 and 3
            """,
        }
    )
    events = [(event.module.name, event.line) for event in SettingsWalk(package).events]
    assert events == [
        ("jaxformer.run", 5),
        ("jaxformer.run", 6),
        ("jaxformer.setup", 7),
        ("jaxformer.run", 6),
        ("jaxformer.run", 7),
        ("jaxformer.settings", 7),
        ("jaxformer.run", 9),
        ("jaxformer.run", 11),
    ]


def test_the_walk_enters_a_function_once(write: Write) -> None:
    package = write(
        {
            "run.py": """
                def train(run: "RunConfig"):
                    again(run)
                    again(run)
                def again(run):
                    run.steps
                    again(run)
            """
        }
    )
    assert [event.line for event in SettingsWalk(package).events] == [2, 5, 6, 3]


def test_a_walk_without_a_start_is_refused(write: Write) -> None:
    package = write({"run.py": "def train(path: str): ..."})
    with pytest.raises(
        LookupError, match=r"0 functions are `def train\(RunConfig, ...\)`, not one"
    ):
        SettingsWalk(package)


def test_functions_that_take_a_record_are_known_by_their_annotations(write: Write) -> None:
    package = write(
        {
            "a.py": """
                def plain(run: RunConfig): ...
                def text(*, run: "RunConfig | None" = None): ...
                class A:
                    async def many(self, runs: dict[int, config.RunConfig]): ...
                def returns(run) -> RunConfig: ...
                def longer(run: RunConfigs): ...
                def setup(setup: RunSetup): ...
            """
        }
    )
    assert figures.functions_taking(package, "RunConfig") == [
        "jaxformer/a.py:1 plain",
        "jaxformer/a.py:2 text",
        "jaxformer/a.py:4 many",
    ]
    assert figures.functions_taking(package, "RunSetup") == ["jaxformer/a.py:7 setup"]


def test_own_imports_inside_functions_are_counted_by_statement(write: Write) -> None:
    package = write(
        {
            "a.py": """
                from typing import TYPE_CHECKING
                import jaxformer.b
                if TYPE_CHECKING:
                    from jaxformer.c import C
                class A:
                    def method(self):
                        import json
                        from jaxformer import b, c
                        from .c import C, D
            """,
            "b.py": "",
            "c.py": "",
        }
    )
    assert figures.lazy_imports(package) == [
        "jaxformer/a.py:8 jaxformer.b, jaxformer.c",
        "jaxformer/a.py:9 jaxformer.c",
    ]
    assert package.graph["jaxformer.a"] == {"jaxformer.b", "jaxformer.c"}


def test_a_name_in_a_stub_stands_for_the_module_that_defines_it(write: Write) -> None:
    package = write(
        {
            "words/__init__.pyi": "from .bpe import train_bpe",
            "words/bpe.py": "def train_bpe(run): ...",
            "a.py": "from jaxformer.words import train_bpe",
        }
    )
    assert package.graph["jaxformer.a"] == {"jaxformer.words.bpe"}
    definition = package.definition("jaxformer.words.train_bpe")
    assert definition and definition[0].name == "jaxformer.words.bpe"


def test_modules_named_by_a_text_are_listed(write: Write) -> None:
    package = write(
        {
            "layers/a.py": """
                TABLE = {"b": "jaxformer.layers.b", "c": "jaxformer.c"}
                NAMES = ("jaxformer", "jaxformer.layers", "jaxformer.layers.a")
            """,
            "layers/b.py": "",
        }
    )
    assert figures.modules_by_text(package) == ["jaxformer/layers/a.py:1 jaxformer.layers.b"]


def test_reach_is_what_a_program_loads_and_what_its_functions_import(write: Write) -> None:
    package = write(
        {
            "a.py": "import jaxformer.b\ndef f():\n    from jaxformer.layers.c import C\n",
            "b.py": "X = 1\n",
            "layers/c.py": "import jaxformer.d\nC = 1\n",
            "d.py": "def f():\n    import jaxformer.b\n\n\n",
            "e.py": "import jaxformer.a\n",
        }
    )
    loaded = figures.loaded_by(package, "import jaxformer.a\nprint('a line of its own')")
    assert loaded == {"jaxformer", "jaxformer.a", "jaxformer.b"}
    assert figures.lines_of(package, loaded) == 0 + 3 + 1
    reached = figures.with_lazy_imports(package, loaded)
    assert reached - loaded == {"jaxformer.layers", "jaxformer.layers.c", "jaxformer.d"}
    assert figures.lines_of(package, reached) == 4 + 0 + 2 + 4


def test_sizes_of_files_are_lines_as_wc_counts_them(write: Write) -> None:
    package = write(
        {
            "short.py": "\n" * 59,
            "long.py": "#" + "\n" * 60,
            "interop/row.py": "X = 1",
            "interop/families/row.py": "X = 1\n",
        }
    )
    assert figures.lines_of(package) == 59 + 60 + 0 + 1
    assert figures.files_of_size(package, 60, 60) == ["jaxformer/long.py:1 60 lines"]
    assert len(figures.files_of_size(package, 0, 59)) == 3
    assert len(figures.files_of_size(package, 0, 59, exempt=())) == 6
    assert figures.files_of_size(package, 0, 59, folder="interop") == [
        "jaxformer/interop/families/row.py:1 1 lines",
        "jaxformer/interop/row.py:1 0 lines",
    ]


def test_every_way_to_bind_a_name_is_counted_but_parameters_and_fields(write: Write) -> None:
    package = write(
        {
            "a.py": """
                class A:
                    held: int = 0
                    kept = 1
                def f(found, *rest):
                    (own, x), *others = found
                    for part in x: y: int = 1
                    with open(x) as place: x += 1
                    if told := x: del x
                    x.known = [whole for whole in x if not (lambda given: given)]
            """
        }
    )
    names = [name for name, _ in figures.assigned_names(package)]
    empty = {name for name, _ in figures.saying_nothing(package)}
    assert empty == {"kept", "own", "others", "part", "place", "told", "whole"}
    assert sorted(names) == sorted([*empty, "x", "x", "y"])
    (figure,) = figures.figures_of_words(package)
    assert figure.value == "70.00 %" and "jaxformer/a.py:8 told" in figure.counted
    assert "kept 1" in figure.note


def test_names_that_several_files_have(write: Write) -> None:
    package = write({"a/rows.py": "", "b/rows.py": "", "b/__main__.py": "", "__main__.py": ""})
    assert figures.repeated_file_names(package) == {
        "rows": ["jaxformer/a/rows.py:1", "jaxformer/b/rows.py:1"]
    }


def test_lines_of_code_leave_out_docstrings_comments_and_blank_lines(write: Write) -> None:
    body = "    '''Text\n\n    over lines.'''\n    # a comment\n\n" + "    x = '''\n    '''\n" * 2
    package = write({"a.py": f"def f():\n{body}def g():\n    'text'\n    return 1\n"})
    assert figures.long_functions(package, limit=5) == []
    assert figures.long_functions(package, limit=4) == ["jaxformer/a.py:1 f: 5 lines of code"]


def test_arguments_are_the_parameters_with_a_name(write: Write) -> None:
    package = write({"a.py": "class A:\n    def f(self, a, /, b, *c, d, **e): ...\n"})
    assert figures.functions_of_many_arguments(package, limit=4) == []
    assert figures.functions_of_many_arguments(package, limit=3) == [
        "jaxformer/a.py:2 f: 4 arguments"
    ]


def test_files_that_mention_a_word(write: Write) -> None:
    package = write({"a.py": "n_virtual = 1", "b.py": "# virtual tokens", "c.py": "x = 1"})
    assert figures.files_mentioning(package, "virtual") == ["jaxformer/a.py:1", "jaxformer/b.py:1"]


def test_circles_are_looked_for_inside_each_folder_and_between_folders(write: Write) -> None:
    package = write(
        {
            "runs/setup.py": "import jaxformer.runs.states",
            "runs/states.py": "def f():\n    import jaxformer.runs.rollback\n",
            "runs/rollback.py": "from jaxformer.runs import setup",
            "runs/summary.py": "import jaxformer.runs.setup\nimport jaxformer.data.rows",
            "data/rows.py": "def f():\n    from jaxformer.runs.setup import X\n",
            "data/pairs.py": "import jaxformer.data.rows",
        }
    )
    assert figures.cycles(package) == [
        ["jaxformer.data", "jaxformer.runs"],
        ["jaxformer.runs.rollback", "jaxformer.runs.setup", "jaxformer.runs.states"],
    ]


def test_the_table_has_the_figures_of_one_or_two_checkouts(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = "def train(run: RunConfig):\n"
    package = write({"run.py": f"{start}    part = run.steps\n    x = y = 1\n"})
    before = write({"run.py": f"{start}    x = 1\n"}, checkout="before")
    monkeypatch.setattr(figures, "loaded_by", lambda package, program: {"jaxformer.run"})
    assert "before" not in figures.table(package)
    lines = figures.table(package, before).splitlines()
    rows = [" ".join(line.split()) for line in lines]
    assert rows[0] == "measure before value goal"
    assert "library lines 2 3 at most 31000" in rows
    assert "assigned names that say nothing 0.00 % 33.33 % under 0.5 %" in rows
    assert "    part 1" in lines
    assert len({line.find(" at most ", 50) for line in lines} - {-1}) == 1


def test_the_script_lists_what_a_measure_counts(write: Write) -> None:
    package = write({"a.py": "part = 1\n"})
    script = Path(figures.__file__)
    command = [sys.executable, str(script), "--root", str(package.root), "--list", "words"]
    output = subprocess.check_output(command, text=True)
    assert output == "assigned names that say nothing: 100.00 %\n    jaxformer/a.py:1 part\n"


# Commands are modules named as they are typed.
COMMANDS = {"attention", "evaluate", "tokenizer", "train"}


def test_the_figures_of_this_package_hold() -> None:
    """Those that are reached may not be lost, and the others may not grow."""
    package = Package.read(Path(__file__).parents[2])
    words = figures.saying_nothing(package)
    assert len(words) < 0.005 * len(figures.assigned_names(package)), words
    short = figures.files_of_size(package, 0, 59)
    assert len(short) <= 15, short
    assert not figures.files_of_size(package, 451, 1_000_000)
    assert {*figures.repeated_file_names(package)} <= COMMANDS
    assert not figures.cycles(package) and not figures.long_functions(package)
    assert len(figures.functions_of_many_arguments(package)) <= 10
    assert not figures.functions_of_many_arguments(package, 8)
    assert len(figures.functions_taking(package, "RunConfig")) <= 28
    assert len(figures.functions_taking(package, "RunSetup")) <= 29
    assert len(figures.lazy_imports(package)) <= 55
