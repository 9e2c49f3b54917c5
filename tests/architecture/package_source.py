"""The source of a package: its modules, what each of them imports and defines. Nothing of the
package is imported; its files are parsed."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef
Graph = Mapping[str, set[str]]


@dataclass(frozen=True)
class Import:
    """An import of a module of the package; a lazy one stands inside a function."""

    line: int
    target: str
    lazy: bool


@dataclass(frozen=True)
class Module:
    """A file of the package under its dotted name; a package's `__init__.py` has its name."""

    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def lines(self) -> int:
        """Lines as `wc -l` counts them."""
        return self.text.count("\n")

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @cached_property
    def functions(self) -> list[Function]:
        """All functions of the file, methods and functions inside functions counted in."""
        return [node for node in ast.walk(self.tree) if isinstance(node, Function)]

    @cached_property
    def definitions(self) -> dict[str, Definition]:
        """The functions and classes at the top of the file, by name."""
        return {node.name: node for node in self.tree.body if isinstance(node, Definition)}

    @cached_property
    def stub_names(self) -> dict[str, str]:
        """The dotted names behind those that `__init__.pyi` lists, from which lazy_loader takes
        the names of a package. Empty for a file without a stub."""
        path = self.path.with_suffix(".pyi")
        if not path.is_file():
            return {}
        return self._imported_names(ast.parse(path.read_text(encoding="utf-8")))

    @cached_property
    def scope(self) -> dict[str, str]:
        """The dotted name behind each imported name, lazy imports counted in."""
        return self.stub_names | self._imported_names(self.tree)

    def _imported_names(self, tree: ast.Module) -> dict[str, str]:
        names = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    bound = alias.asname or alias.name.partition(".")[0]
                    names[bound] = alias.name if alias.asname else bound
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    names[alias.asname or alias.name] = f"{self._source(node)}.{alias.name}"
        return names

    def _source(self, node: ast.ImportFrom) -> str:
        """The absolute name of the module from which a statement imports."""
        if not node.level:
            return node.module or ""
        parents = self.name.split(".")
        parents = parents[: len(parents) + self.is_package - node.level]
        return ".".join([*parents, *([node.module] if node.module else [])])

    @property
    def imported(self) -> Iterator[Import]:
        """The dotted names that the file imports, outside of `if TYPE_CHECKING`."""
        return self._imported(self.tree, lazy=False)

    def _imported(self, node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for statement in node.orelse:
                yield from self._imported(statement, lazy)
            return
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = self._source(node)
            yield from (Import(node.lineno, f"{source}.{a.name}", lazy) for a in node.names)
        lazy = lazy or isinstance(node, Function | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from self._imported(child, lazy)


@dataclass(frozen=True)
class Package:
    """The modules of the package `name` in the checkout `root`, by their dotted names."""

    root: Path
    name: str
    modules: Mapping[str, Module]

    @classmethod
    def read(cls, root: Path, name: str = "jaxformer") -> "Package":
        """Raises FileNotFoundError where `root` has no such package."""
        root = root.resolve()
        if not (root / name / "__init__.py").is_file():
            raise FileNotFoundError(f"{root} is no checkout: it has no {name}/__init__.py")
        modules = {}
        for path in sorted((root / name).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            dotted = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules[dotted] = Module(dotted, path)
        return cls(root, name, modules)

    def where(self, module: Module, line: int = 1) -> str:
        """`file:line`, from the root of the checkout."""
        return f"{module.path.relative_to(self.root)}:{line}"

    def module_of(self, dotted: str) -> str:
        """The longest beginning of a dotted name that is a module of the package, or ""."""
        while dotted and dotted not in self.modules:
            dotted = dotted.rpartition(".")[0]
        return dotted

    def definition(self, dotted: str) -> tuple[Module, Definition] | None:
        """The function or class that a dotted name stands for, through re-exports; None for what
        the package does not define."""
        followed = set()
        while dotted and dotted not in followed:
            followed.add(dotted)
            module_name = self.module_of(dotted)
            module, name = self.modules.get(module_name), dotted[len(module_name) + 1 :]
            if module is None:
                return None
            if name in module.definitions:
                return module, module.definitions[name]
            dotted = module.scope.get(name, "")
        return None

    def imports(self, module: Module) -> list[Import]:
        """The modules of the package that a file imports, one entry for each imported name.

        Imports for type checking are left out. A name that a package lists in its stub stands for
        the module that defines it.
        """
        entries = [
            Import(entry.line, self._defining_module(entry.target), entry.lazy)
            for entry in module.imported
        ]
        return [entry for entry in entries if entry.target not in ("", module.name)]

    def _defining_module(self, dotted: str) -> str:
        module_name = self.module_of(dotted)
        if not module_name:
            return ""
        name = dotted[len(module_name) + 1 :]
        stub_names = self.modules[module_name].stub_names
        return self._defining_module(stub_names[name]) if name in stub_names else module_name

    @cached_property
    def graph(self) -> Graph:
        """The modules that each module imports, lazy imports counted in."""
        modules = self.modules.items()
        return {name: {entry.target for entry in self.imports(module)} for name, module in modules}


def reachable(graph: Graph, names: Iterable[str]) -> set[str]:
    """`names` and all that they lead to."""
    reached: set[str] = set()
    waiting = set(names)
    while waiting:
        name = waiting.pop()
        reached.add(name)
        waiting |= graph[name] - reached
    return reached
