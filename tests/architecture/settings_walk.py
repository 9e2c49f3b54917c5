"""Follows the settings of a run through the functions of a package, as their reader has to."""

import ast
import re
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise

from package_source import Definition, Function, Module, Package, reachable

Types = dict[str, str]  # which record each local name holds


@dataclass(frozen=True)
class Event:
    """A call that passes the settings on, or a read of an attribute of them."""

    module: Module
    line: int


@dataclass(frozen=True)
class Callee:
    """What a call leads to. `receiver` is the record whose method it is, "" for a function."""

    module: Module
    definition: Definition
    receiver: str = ""


@dataclass
class SettingsWalk:
    """The first `limit` events in the life of a record, from a function that takes it first.

    The walk follows the record from `function` on, in the order of the source, into each function
    of the package that gets it as an argument, once into each. Events are the calls with the record
    among their arguments and the reads of its attributes. A class with an annotated field of the
    record carries it: such an object is followed too, its methods counted in, but of its attributes
    only the record itself. Calls and `dataclasses.replace` give a record where their annotation
    says so or their first argument was one and their annotation is a type variable. Parts of the
    record, such as `run.model`, are not followed.
    """

    package: Package
    record: str = "RunConfig"
    function: str = "train"
    limit: int = 400
    events: list[Event] = field(default_factory=list)
    _entered: list[Function] = field(default_factory=list)

    def __post_init__(self) -> None:
        starts = [
            (module, definition, definition.args.args[0])
            for module in self.package.modules.values()
            for name, definition in module.definitions.items()
            if name == self.function and isinstance(definition, Function) and definition.args.args
        ]
        starts = [start for start in starts if record_in(start[2].annotation, {self.record})]
        if len(starts) != 1:
            raise LookupError(
                f"{len(starts)} functions are `def {self.function}({self.record}, ...)`, not one"
            )
        module, definition, parameter = starts[0]
        self._enter(module, definition, {parameter.arg: self.record})

    @property
    def files(self) -> list[str]:
        """The files with an event, in the order of their first one."""
        return list(dict.fromkeys(event.module.name for event in self.events))

    @property
    def stays(self) -> list[str]:
        """The file of each run of successive events in one file."""
        return [name for name, _ in groupby(event.module.name for event in self.events)]

    @property
    def climbs(self) -> list[tuple[str, str]]:
        """The moves from a stay to the next one whose file imports, directly or not and lazily or
        not, the file that is left: the reader goes back up."""
        graph = self.package.graph
        moves = pairwise(self.stays)
        return [(left, next_) for left, next_ in moves if left in reachable(graph, graph[next_])]

    @cached_property
    def carriers(self) -> dict[str, Types]:
        """The record and the classes that carry it, each with its fields of the record, those of
        its bases among them."""
        carriers: dict[str, Types] = {self.record: {}}
        for module in self.package.modules.values():
            for node in module.definitions.values():
                entries = [entry for entry in node.body if isinstance(entry, ast.AnnAssign)]
                fields = {
                    ast.unparse(entry.target): self.record
                    for entry in entries
                    if record_in(entry.annotation, {self.record})
                }
                if isinstance(node, ast.ClassDef) and fields:
                    carriers[node.name] = fields
        for name, node in self._classes.items():
            for base in self._bases(node):
                if carriers.get(base):
                    carriers[name] = carriers[base] | carriers.get(name, {})
        return carriers

    @cached_property
    def _classes(self) -> dict[str, ast.ClassDef]:
        definitions = [
            node for module in self.package.modules.values() for node in module.definitions.values()
        ]
        return {node.name: node for node in definitions if isinstance(node, ast.ClassDef)}

    def _bases(self, node: ast.ClassDef) -> list[str]:
        """The names of the classes of the package that a class inherits from, the nearest first."""
        bases = [ast.unparse(base) for base in node.bases if ast.unparse(base) in self._classes]
        return [name for base in bases for name in (base, *self._bases(self._classes[base]))]

    def _enter(self, module: Module, function: Function, types: Types) -> None:
        if function not in self._entered:
            self._entered.append(function)
            for statement in function.body:
                self._visit(module, statement, types)

    def _count(self, module: Module, node: ast.expr) -> None:
        if len(self.events) < self.limit:
            self.events.append(Event(module, node.lineno))

    def _visit(self, module: Module, node: ast.AST, types: Types) -> None:
        """Walks one statement or expression; what a call is given comes before the call."""
        if len(self.events) >= self.limit:
            return
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value:
            self._visit(module, node.value, types)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self._bind(module, target, node.value, types)
            return
        for child in ast.iter_child_nodes(node):
            self._visit(module, child, types)
        if isinstance(node, ast.Attribute):
            if self._record_of(module, node.value, types) == self.record:
                self._count(module, node)
        elif isinstance(node, ast.Call):
            self._call(module, node, types)

    def _bind(self, module: Module, target: ast.expr, value: ast.expr, types: Types) -> None:
        if isinstance(target, ast.Name):
            types[target.id] = self._record_of(module, value, types)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for inner, inner_value in zip(target.elts, value.elts, strict=False):
                self._bind(module, inner, inner_value, types)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Call):
            callee = self._callee(module, value, types)
            returns = callee and getattr(callee.definition, "returns", None)
            if isinstance(returns, ast.Subscript) and isinstance(returns.slice, ast.Tuple):
                for inner, annotation in zip(target.elts, returns.slice.elts, strict=False):
                    types[ast.unparse(inner)] = record_in(annotation, self.carriers)

    def _call(self, module: Module, node: ast.Call, types: Types) -> None:
        """Counts a call that passes a record on, and enters what it calls."""
        callee = self._callee(module, node, types)
        arguments = [self._record_of(module, argument, types) for argument in node.args]
        keywords = {
            keyword.arg: self._record_of(module, keyword.value, types)
            for keyword in node.keywords
            if keyword.arg
        }
        if not any([*arguments, *keywords.values(), callee and callee.receiver]):
            return
        self._count(module, node)
        if callee is None:
            return
        function: Definition | None = callee.definition
        is_method = bool(callee.receiver)
        if isinstance(function, ast.ClassDef):
            is_method, function = True, method(function, "__init__")
        if isinstance(function, Function):
            names = [entry.arg for entry in function.args.posonlyargs + function.args.args]
            if is_method:
                arguments = [callee.receiver, *arguments]
            passed = dict(zip(names, arguments, strict=False)) | keywords
            self._enter(callee.module, function, passed)

    def _callee(self, module: Module, node: ast.Call, types: Types) -> Callee | None:
        """What the name in front of the parentheses stands for, if the package defines it."""
        if isinstance(node.func, ast.Attribute):
            record = self._record_of(module, node.func.value, types)
            if record:
                return self._method_of(record, node.func.attr)
        name, _, rest = ast.unparse(node.func).partition(".")
        if name in module.definitions and not rest:
            return Callee(module, module.definitions[name])
        dotted = module.scope.get(name, "") + ("." + rest if rest else "")
        definition = self.package.definition(dotted)
        return Callee(*definition) if definition else None

    def _method_of(self, record: str, name: str) -> Callee | None:
        for module in self.package.modules.values():
            for owner in (record, *self._bases(self._classes[record])):
                definition = module.definitions.get(owner)
                if isinstance(definition, ast.ClassDef):
                    function = method(definition, name)
                    if function:
                        return Callee(module, function, record)
        return None

    def _record_of(self, module: Module, node: ast.expr, types: Types) -> str:
        """The record, or the class that carries it, that an expression gives, "" for others."""
        if isinstance(node, ast.Name):
            return types.get(node.id, "")
        if isinstance(node, ast.Attribute):
            owner = self._record_of(module, node.value, types)
            return self.carriers[owner].get(node.attr, "") if owner else ""
        if isinstance(node, ast.Subscript):
            return self._record_of(module, node.value, types)
        if isinstance(node, ast.Lambda):
            return self._record_of(module, node.body, types)
        if not isinstance(node, ast.Call):
            return ""
        callee = self._callee(module, node, types)
        if callee and isinstance(callee.definition, ast.ClassDef):
            return callee.definition.name if callee.definition.name in self.carriers else ""
        keeps_type = ast.unparse(node.func) in ("dataclasses.replace", "replace")
        if callee and isinstance(callee.definition, Function):
            returns = callee.definition.returns
            if record := record_in(returns, self.carriers):
                return record
            text = callee.module.text
            keeps_type = returns is not None and f"{ast.unparse(returns)} = TypeVar(" in text
        return self._record_of(module, node.args[0], types) if keeps_type and node.args else ""


def record_in(annotation: ast.expr | None, records: set[str] | dict[str, Types]) -> str:
    """The first of `records` that an annotation names, also in a text or a union, or ""."""
    words = re.findall(r"\w+", ast.unparse(annotation)) if annotation else []
    return next((word for word in words if word in records), "")


def method(definition: ast.ClassDef, name: str) -> Function | None:
    functions = [node for node in definition.body if isinstance(node, Function)]
    return next((function for function in functions if function.name == name), None)
