"""Measures the architecture of a checkout and prints the figures beside their goals.

    python tests/architecture/figures.py [--root DIR] [--before DIR] [--list MEASURE]

`--before` adds a column with the figures of another checkout, such as a worktree of an older
commit. `--list` prints what one measure counts, with file and line. Nothing of the package is
imported here: its files are parsed, and the two programs that measure reach run in processes of
their own.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

from package_source import Function, Graph, Module, Package, reachable
from settings_walk import SettingsWalk, record_in

# Names that do not say what a value holds.
WORDS = frozenset(
    (
        *("found", "told", "own", "held", "given", "whole", "place", "part", "known", "most"),
        *("kept", "said", "taken", "wanted", "asked_for", "thing", "things", "stuff", "more"),
        *("rest", "other", "others", "it", "there", "here"),
    )
)
STARTS = ("__init__", "__main__")  # the stems of files that every folder may have
LOOSE = ("__init__.py", "__main__.py", "files.py")  # the files that may stand at the top
FORWARD = """
import jax, jaxformer as jf
config = jf.ModelConfig(vocab_size=8, d_model=8, n_heads=2, n_layers=1)
jf.forward(jf.init(config, jax.random.key(0)), config, jax.numpy.zeros((1, 4), int))
"""
FIT = """
import jax, optax, tempfile, jaxformer as jf
def loss(params, batch, key): return {"loss": ((params * batch).sum(), batch.size)}
optimizer = optax.sgd(0.1)
checkpoints = jf.Checkpoints(tempfile.mkdtemp())
state = jf.init_state(jax.numpy.ones(3), optimizer)
batches = [jax.numpy.ones((2, 3))]
jf.fit(jf.make_step(loss, optimizer), state, batches, steps=1, checkpoints=checkpoints)
"""


@dataclass(frozen=True)
class Figure:
    """A row of the table. `counted` are the lines that `--list` prints, and `note` is a line below
    the row."""

    name: str
    value: str
    goal: str = ""
    counted: list[str] = field(default_factory=list)
    note: str = ""


def top_entries(package: Package) -> list[str]:
    """Files and folders directly in the package, without caches and the stub `__init__.pyi`."""
    ignored = ("__pycache__", "__init__.pyi")
    folder = package.root / package.name
    return sorted(path.name for path in folder.iterdir() if path.name not in ignored)


def loose_files(package: Package, allowed: Collection[str] = LOOSE) -> list[str]:
    """Python files directly in the package, besides those that may stand there."""
    return [name for name in top_entries(package) if name.endswith(".py") and name not in allowed]


def functions_taking(package: Package, record: str) -> list[str]:
    """Functions and methods with a parameter whose annotation names a record, also in a text, a
    union or a container."""
    return [
        f"{package.where(module, node.lineno)} {node.name}"
        for module in package.modules.values()
        for node in module.functions
        if any(record_in(entry.annotation, {record}) for entry in arguments(node))
    ]


def arguments(node: Function) -> list[ast.arg]:
    """The parameters of a function that have a name; `self` is one, `*args` is none."""
    return node.args.posonlyargs + node.args.args + node.args.kwonlyargs


def lazy_imports(package: Package) -> list[str]:
    """Import statements inside functions that import modules of the package."""
    return [
        f"{package.where(module, line)} {', '.join(sorted(targets))}"
        for module in package.modules.values()
        for line, targets in sorted(_lazy_targets(package, module).items())
    ]


def _lazy_targets(package: Package, module: Module) -> dict[int, set[str]]:
    targets = defaultdict(set)
    for entry in package.imports(module):
        if entry.lazy:
            targets[entry.line].add(entry.target)
    return targets


def modules_by_text(package: Package) -> list[str]:
    """Texts that are the name of a module of the package, as `importlib.import_module` takes them;
    the other measures of imports do not see these. The names of the package itself, of the file
    and of its folder are left out."""
    texts = []
    for module in package.modules.values():
        left_out = (package.name, module.name, module.name.rpartition(".")[0])
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            if node.value in package.modules and node.value not in left_out:
                texts.append(f"{package.where(module, node.lineno)} {node.value}")
    return texts


def loaded_by(package: Package, program: str) -> set[str]:
    """The modules of the package that are imported when a program has run in the checkout."""
    names = f"[name for name in sys.modules if name.split('.')[0] == {package.name!r}]"
    code = f"{program}\nimport json, sys\nprint(json.dumps({names}))"
    environment = os.environ | {"PYTHONPATH": str(package.root), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code]
    output = subprocess.check_output(command, cwd=package.root, env=environment, text=True)
    return set(json.loads(output.splitlines()[-1]))


def with_lazy_imports(package: Package, loaded: Iterable[str]) -> set[str]:
    """`loaded`, and what their functions import, directly or not, with the packages around it."""
    parents = {name: name.rpartition(".")[0] for name in package.modules}
    graph = {
        name: targets | ({parents[name]} & set(package.modules))
        for name, targets in package.graph.items()
    }
    return reachable(graph, loaded)


def lines_of(package: Package, names: Iterable[str] | None = None) -> int:
    """Lines of these modules, or of all of them, as `wc -l` counts them."""
    return sum(
        package.modules[name].lines for name in (package.modules if names is None else names)
    )


def files_of_size(
    package: Package,
    shortest: int,
    longest: int,
    exempt: Collection[str] = STARTS,
    folder: str = "",
) -> list[str]:
    """Files of `shortest` to `longest` lines whose stem is not exempt, everywhere or in the folders
    of one name."""
    return [
        f"{package.where(module)} {module.lines} lines"
        for module in package.modules.values()
        if shortest <= module.lines <= longest
        and module.path.stem not in exempt
        and (not folder or folder in module.path.relative_to(package.root).parts[:-1])
    ]


def assigned_names(package: Package) -> list[tuple[str, str]]:
    """Each name that an assignment, a loop, a `with`, a walrus or a comprehension binds, with where
    it does. Parameters of functions and annotated fields of classes are none."""
    names = []
    for module in package.modules.values():
        classes = [node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
        entries = [entry for node in classes for entry in node.body]
        fields = {entry.target for entry in entries if isinstance(entry, ast.AnnAssign)}
        names += [
            (node.id, package.where(module, node.lineno))
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in fields
        ]
    return names


def saying_nothing(package: Package) -> list[tuple[str, str]]:
    """Those of `assigned_names` that are one of WORDS."""
    return [(name, where) for name, where in assigned_names(package) if name in WORDS]


def repeated_file_names(package: Package) -> dict[str, list[str]]:
    """The names that several files of the package have, with these files."""
    files = defaultdict(list)
    for module in package.modules.values():
        if module.path.stem not in STARTS:
            files[module.path.stem].append(package.where(module))
    return {stem: paths for stem, paths in files.items() if len(paths) > 1}


def code_lines(module: Module) -> set[int]:
    """Numbers of the lines that hold code: neither blank nor a comment alone."""
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    layout |= {tokenize.ENCODING, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(StringIO(module.text).readline)
    spans = [(token.start[0], token.end[0]) for token in tokens if token.type not in layout]
    return {number for first, last in spans for number in range(first, last + 1)}


def long_functions(package: Package, limit: int = 50) -> list[str]:
    """Functions of more lines of code than `limit`: without docstring, comments and blank lines."""
    long = []
    for module in package.modules.values():
        code = code_lines(module)
        for node in module.functions:
            length = len(code & lines_spanned(node)) - len(code & docstring_lines(node))
            if length > limit:
                where = package.where(module, node.lineno)
                long.append(f"{where} {node.name}: {length} lines of code")
    return long


def lines_spanned(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def docstring_lines(node: Function) -> set[int]:
    has_docstring = ast.get_docstring(node, clean=False) is not None
    return lines_spanned(node.body[0]) if has_docstring else set()


def functions_of_many_arguments(package: Package, limit: int = 7) -> list[str]:
    """Functions of more parameters than `limit`; `self` is one, `*args` and `**kwargs` are none."""
    return [
        f"{package.where(module, node.lineno)} {node.name}: {len(arguments(node))} arguments"
        for module in package.modules.values()
        for node in module.functions
        if len(arguments(node)) > limit
    ]


def files_mentioning(package: Package, word: str) -> list[str]:
    """Files whose text, comments and docstrings too, has the word, also within another one."""
    return [package.where(module) for module in package.modules.values() if word in module.text]


def cycles(package: Package) -> list[list[str]]:
    """The circles of imports inside each folder, lazy imports counted in.

    The members of a folder are its files and its subfolders; a subfolder imports what any of its
    files imports. A circle is a set of members each of which leads to each of the others; the
    folder's own `__init__.py` is none of them.
    """
    all_circles = []
    for folder in [name for name, module in package.modules.items() if module.is_package]:
        graph = _members(package, folder)
        reached = {name: reachable(graph, targets) for name, targets in graph.items()}
        circles = {
            tuple(sorted(other for other in reached[name] if name in reached[other]))
            for name in graph
            if name in reached[name]
        }
        all_circles += [list(circle) for circle in sorted(circles)]
    return all_circles


def _members(package: Package, folder: str) -> Graph:
    """Which member of a folder imports which other one, under their dotted names."""
    inside = f"{folder}."
    graph: dict[str, set[str]] = defaultdict(set)
    for name, targets in package.graph.items():
        if name.startswith(inside):
            member = inside + name.removeprefix(inside).split(".")[0]
            below = [target.removeprefix(inside) for target in targets if target.startswith(inside)]
            graph[member] |= {inside + target.split(".")[0] for target in below} - {member}
    return graph


def _counted(name: str, counted: list[str], goal: str = "") -> Figure:
    return Figure(name, str(len(counted)), goal, counted)


def figures_of_top(package: Package) -> list[Figure]:
    return [
        _counted("entries at the top", top_entries(package), "at most 20"),
        _counted(f"loose files but {', '.join(LOOSE)}", loose_files(package), "0"),
    ]


def figures_of_walk(package: Package) -> list[Figure]:
    """At commit 5ff1842 this walk gives 27 files, 90 stays and 41 climbs."""
    walk = SettingsWalk(package)
    events = [package.where(event.module, event.line) for event in walk.events]
    climbs = [f"{left} -> {next_}" for left, next_ in walk.climbs]
    return [
        _counted("RunConfig from train: events, at most 400", events),
        _counted("RunConfig from train: files", walk.files, "at most 25"),
        _counted("RunConfig from train: stays", walk.stays, "at most 60"),
        _counted("RunConfig from train: climbs", climbs),
    ]


def figures_of_records(package: Package) -> list[Figure]:
    return [
        _counted(f"functions that take {record}", functions_taking(package, record), "at most 25")
        for record in ("RunConfig", "RunSetup")
    ]


def figures_of_imports(package: Package) -> list[Figure]:
    return [
        _counted("own imports inside functions", lazy_imports(package), "heavy and outside only"),
        _counted("own modules named by a text", modules_by_text(package)),
    ]


def figures_of_reach(package: Package) -> list[Figure]:
    figures = []
    for name, program, goal in (("forward", FORWARD, "3400"), ("fit", FIT, "3200")):
        loaded = loaded_by(package, program)
        reached = with_lazy_imports(package, loaded)
        early = _sizes(package, loaded)
        late = _sizes(package, reached - loaded)
        lines = str(lines_of(package, loaded))
        figures.append(Figure(f"lines that jf.{name} reaches at run time", lines, "", early))
        lines = str(lines_of(package, reached))
        figures.append(Figure("  with lazy imports", lines, f"at most {goal}", late))
    return figures


def _sizes(package: Package, names: Iterable[str]) -> list[str]:
    modules = [package.modules[name] for name in sorted(names)]
    return [f"{package.where(module)} {module.lines} lines" for module in modules]


def figures_of_sizes(package: Package) -> list[Figure]:
    sizes = {stem: files_of_size(package, 0, 59, folder=stem) for stem in ("", "interop")}
    return [
        _counted("files under 60 lines, without __init__ and __main__", sizes[""], "at most 15"),
        _counted("  those in interop/", sizes["interop"]),
        _counted("files over 450 lines", files_of_size(package, 451, 1_000_000), "0"),
        _counted("files of 280 to 299 lines", files_of_size(package, 280, 299), "no pile"),
        Figure("library lines", str(lines_of(package)), "at most 31000"),
    ]


def figures_of_words(package: Package) -> list[Figure]:
    names, empty = assigned_names(package), saying_nothing(package)
    share = 100 * len(empty) / max(len(names), 1)
    counted = [f"{where} {name}" for name, where in empty]
    frequent = Counter(name for name, _ in empty).most_common(10)
    note = ", ".join(f"{name} {count}" for name, count in frequent)
    return [
        Figure("assigned names that say nothing", f"{share:.2f} %", "under 0.5 %", counted, note)
    ]


def figures_of_names(package: Package) -> list[Figure]:
    names = repeated_file_names(package).items()
    counted = [f"{stem}: {' '.join(files)}" for stem, files in names]
    return [_counted("names that several files have", counted, "0")]


def figures_of_functions(package: Package) -> list[Figure]:
    return [
        _counted("functions over 50 lines of code", long_functions(package), "0"),
        _counted("functions over 7 arguments", functions_of_many_arguments(package), "0"),
    ]


def figures_of_mentions(package: Package) -> list[Figure]:
    goals = {"next_sentence": "1", "virtual": "at most 10"}
    return [
        _counted(f"files that mention {word}", files_mentioning(package, word), goal)
        for word, goal in goals.items()
    ]


def figures_of_cycles(package: Package) -> list[Figure]:
    circles = [" ".join(circle) for circle in cycles(package)]
    return [_counted("circles of imports inside a folder", circles, "0")]


MEASURES: dict[str, Callable[[Package], list[Figure]]] = {
    "top": figures_of_top,
    "walk": figures_of_walk,
    "records": figures_of_records,
    "imports": figures_of_imports,
    "reach": figures_of_reach,
    "sizes": figures_of_sizes,
    "words": figures_of_words,
    "names": figures_of_names,
    "functions": figures_of_functions,
    "mentions": figures_of_mentions,
    "cycles": figures_of_cycles,
}


def table(package: Package, before: Package | None = None) -> str:
    """All figures in aligned columns: measure, value before if asked for, value, goal."""
    rows = [("measure", "before", "value", "goal")]
    notes = [""]
    for measure in MEASURES.values():
        figures = measure(package)
        values = [figure.value for figure in (measure(before) if before else figures)]
        for old, figure in zip(values, figures, strict=True):
            rows.append((figure.name, old, figure.value, figure.goal))
            notes.append(f"    {figure.note}\n" if figure.note else "")
    columns = [column for column in zip(*rows, strict=True) if before or column[0] != "before"]
    widths = [max(map(len, column)) for column in columns]
    lines = ["  ".join(map(str.ljust, row, widths)) for row in zip(*columns, strict=True)]
    return "".join(f"{line.rstrip()}\n{note}" for line, note in zip(lines, notes, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the architecture of a checkout.")
    checkout = Path(__file__).parents[2]
    parser.add_argument("--root", type=Path, default=checkout, help="the checkout to measure")
    parser.add_argument("--before", type=Path, help="a checkout to compare it with")
    parser.add_argument("--list", choices=MEASURES, help="print what this measure counts")
    options = parser.parse_args()
    package = Package.read(options.root)
    if not options.list:
        print(table(package, Package.read(options.before) if options.before else None), end="")
        return
    for figure in MEASURES[options.list](package):
        print(f"{figure.name}: {figure.value}")
        print("".join(f"    {line}\n" for line in figure.counted), end="")


if __name__ == "__main__":
    main()
