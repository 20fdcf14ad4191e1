"""Find the branches of a program that depend on a number read by a line, and the lines that accumulate a line's
result: from the source, without running it.

A number may be stored and compared later (``loss = total.item()``, and lines below ``if loss < best``). It is
followed through assignments in the same function, containers that it is appended to, the function's return value and
attributes in the methods of its class. Whether such a branch is executed is not examined, nor arguments of other
functions.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

# Methods by which a container takes a value in.
_TAKES = frozenset(["append", "appendleft", "extend", "insert", "add", "update", "push", "put", "setdefault"])
# Functions whose result does not depend on the value of a number.
_BLIND = frozenset(["len", "isinstance", "hasattr", "type", "callable", "id"])

_PLACE = re.compile(r"^(?:.* at )?(.+):(\d+)$")

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Scope = ast.Module | Function


@dataclass(frozen=True, kw_only=True)
class Branch:
    """The line where the condition begins, and its function.

    ``reads``: the condition itself reads the number.
    """

    file: str
    line: int
    function: str
    reads: bool


def branches_of(frame: FrameType | None) -> tuple[Branch, ...]:
    """The branches that depend on what the current statement of ``frame`` reads; none without a frame."""
    places: list[tuple[CodeType, int]] = []
    while frame is not None:
        places.append((frame.f_code, frame.f_lineno))
        if not _returns(frame.f_code, frame.f_lineno):
            break
        frame = frame.f_back
    return _branches_at(tuple(places))


def keeping_lines(places: Iterable[str]) -> list[str]:
    """The lines that add a line's result to a list, a sum or a cache that outlives the line.

    Args:
        places: The line and its callers, innermost first, each ending in a path and a number.
    """
    inner: list[str] = []
    for place in places:
        match = _PLACE.search(place)
        source = _source(match[1]) if match else None
        if match is None or source is None:
            break
        flow = _Flow(source, source.scope_at(int(match[2])), int(match[2]))
        numbers = sorted(set(flow.keeping_lines()))
        lines = [f"{Path(match[1]).name}:{line}: {linecache.getline(match[1], line).strip()}" for line in numbers]
        if not flow.is_returned:
            return lines or inner
        inner = inner or lines  # a function's local containers are mostly freed when it returns
    return inner


@functools.lru_cache(maxsize=4096)
def _returns(code: CodeType, line: int) -> bool:
    """True if a value read in that line, or one computed from it, is returned to the caller."""
    source = _source(code.co_filename)
    scope = source.scope(code) if source else None
    if source is None or scope is None or isinstance(scope, ast.Module):
        return False
    return isinstance(scope, ast.Lambda) or _Flow(source, scope, line).is_returned


@functools.lru_cache(maxsize=4096)
def _branches_at(places: tuple[tuple[CodeType, int], ...]) -> tuple[Branch, ...]:
    branches: dict[Branch, None] = {}
    for code, line in places:
        source = _source(code.co_filename)
        scope = source.scope(code) if source else None
        if source is not None and scope is not None:
            branches |= dict.fromkeys(_Flow(source, scope, line).branches())
    return tuple(branches)


class _Source:
    """A file's functions by name and first line."""

    def __init__(self, file: str, tree: ast.Module) -> None:
        self.file, self._tree = file, tree
        self._functions: dict[tuple[str, int], Function] = {}
        self.names: dict[int, str] = {id(tree): "<module>"}
        self._classes: dict[int, ast.ClassDef] = {}
        self._enter(tree, "", None)

    def _enter(self, node: ast.AST, path: str, owner: ast.ClassDef | None) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                name = getattr(child, "name", "<lambda>")
                first = min([child.lineno, *(decorator.lineno for decorator in getattr(child, "decorator_list", []))])
                self._functions.setdefault((name, first), child)
                self.names[id(child)] = f"{path}{name}"
                if owner is not None:
                    self._classes[id(child)] = owner
                self._enter(child, f"{path}{name}.<locals>.", None)
            elif isinstance(child, ast.ClassDef):
                self._enter(child, f"{path}{child.name}.", child)
            else:
                self._enter(child, path, owner)

    def scope(self, code: CodeType) -> Scope | None:
        if code.co_name == "<module>":
            return self._tree
        if code.co_name.startswith("<") and code.co_name != "<lambda>":  # a comprehension, in the function around it
            inside = [f for f in self._functions.values() if f.lineno <= code.co_firstlineno <= (f.end_lineno or 0)]
            return max(inside, key=lambda f: f.lineno, default=self._tree)
        return self._functions.get((code.co_name, code.co_firstlineno))

    def scope_at(self, line: int) -> Scope:
        """The innermost function with that line, or the module."""
        around = [f for f in self._functions.values() if f.lineno <= line <= (f.end_lineno or 0)]
        return max(around, key=lambda function: function.lineno, default=self._tree)

    def methods_beside(self, scope: Scope) -> list[Scope]:
        """The other functions of the class that ``scope`` is a method of."""
        owner = self._classes.get(id(scope))
        functions = self._functions.values()
        return [] if owner is None else [f for f in functions if self._classes.get(id(f)) is owner and f is not scope]


@functools.lru_cache(maxsize=256)
def _source(file: str) -> _Source | None:
    try:
        return _Source(file, ast.parse("".join(linecache.getlines(file))))
    except (SyntaxError, ValueError, RecursionError):  # ValueError: null bytes; RecursionError: long expressions
        return None


class _Flow:
    """Data flow of the values that a line of ``scope`` reads: the names that they reach (``best``, ``self.best``)."""

    def __init__(self, source: _Source, scope: Scope, line: int) -> None:
        self._source, self._scope = source, scope
        self._nodes = list(_within(scope))
        self._line = line
        self.tainted: set[str] = set()
        self.is_returned = False
        for node in self._nodes:
            if isinstance(node, (ast.stmt, ast.NamedExpr, ast.Call)) and _covers(node, line):
                self._take(node)
        self._own_tests: list[ast.expr] = [test for test in _tests(self._nodes) if _covers(test, line)]
        before = -1
        while before != len(self.tainted):
            before = len(self.tainted)
            for node in self._nodes:
                if any(_mentions(value, self.tainted) for value in _values(node)):
                    self._take(node)

    def _take(self, node: ast.AST) -> None:
        self.tainted.update(_targets(node))
        self.is_returned |= isinstance(node, (ast.Return, ast.Yield))

    def keeping_lines(self) -> Iterator[int]:
        """Statements that add the value to a container or a sum."""
        for node in self._nodes:
            values = _values(node)
            takes = any(_covers(value, self._line) or _mentions(value, self.tainted) for value in values)
            if takes and isinstance(node, (ast.stmt, ast.Call)) and _keeps(node):
                yield node.lineno

    def branches(self) -> Iterator[Branch]:
        yield from self._of(self._scope, self._own_tests, reads=True)
        later = [t for t in _tests(self._nodes) if t not in self._own_tests and _hangs(t, self.tainted)]
        yield from self._of(self._scope, later)
        attributes = {name for name in self.tainted if name.startswith("self.")}
        for method in self._source.methods_beside(self._scope) if attributes else ():
            yield from self._of(method, (t for t in _tests(_within(method)) if _hangs(t, attributes)))

    def _of(self, scope: Scope, tests: Iterable[ast.expr], *, reads: bool = False) -> Iterator[Branch]:
        name = self._source.names[id(scope)]
        for test in tests:
            yield Branch(file=self._source.file, line=test.lineno, function=name, reads=reads)


def _within(scope: Scope) -> Iterator[ast.AST]:
    """All nodes of a scope, without those of functions and classes defined in it."""
    todo: list[ast.AST] = list(ast.iter_child_nodes(scope))
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, (Function, ast.ClassDef)):
            todo.extend(ast.iter_child_nodes(node))


def _covers(node: ast.stmt | ast.expr, line: int) -> bool:
    """True if the node, or the head of a compound statement, covers that line."""
    last = node.end_lineno or node.lineno
    body = getattr(node, "body", None)
    if isinstance(node, ast.stmt) and isinstance(body, list):
        last = max(node.lineno, body[0].lineno - 1)
    cases = getattr(node, "cases", None)
    if cases:
        last = max(node.lineno, cases[0].pattern.lineno - 1)
    return node.lineno <= line <= last


def _values(node: ast.AST) -> list[ast.expr]:
    """The values that the node stores, returns or iterates over."""
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.NamedExpr)):
        return [node.value]
    if isinstance(node, (ast.AnnAssign, ast.Return, ast.Yield)):
        return [node.value] if node.value is not None else []
    if isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        return [node.iter]
    if isinstance(node, ast.Call) and _taker(node):
        return [*node.args, *(keyword.value for keyword in node.keywords)]
    return []


def _targets(node: ast.AST) -> Iterator[str]:
    """The names that the node stores into."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _stored(target)
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr, ast.For, ast.AsyncFor, ast.comprehension)):
        yield from _stored(node.target)
    elif isinstance(node, ast.Expr):
        yield from _targets(node.value)
    elif isinstance(node, ast.Call) and (name := _taker(node)):
        yield name


def _keeps(node: ast.stmt | ast.Call) -> bool:
    """True if the target of the node's store also retains its earlier content."""
    if isinstance(node, (ast.AugAssign, ast.Call)):
        return True
    if not isinstance(node, ast.Assign):
        return False
    is_entry = any(isinstance(target, ast.Subscript) for target in node.targets)
    return is_entry or _mentions(node.value, set(_targets(node)))


def _stored(target: ast.expr) -> Iterator[str]:
    if isinstance(target, (ast.Tuple, ast.List)):
        for element in target.elts:
            yield from _stored(element)
    elif isinstance(target, (ast.Starred, ast.Subscript)):
        yield from _stored(target.value)
    elif name := _dotted(target):
        yield name


def _taker(call: ast.Call) -> str:
    """Name of the container that takes the call's arguments: ``losses`` of ``losses.append(...)``."""
    function = call.func
    return _dotted(function.value) if isinstance(function, ast.Attribute) and function.attr in _TAKES else ""


def _dotted(node: ast.expr) -> str:
    """``a.b`` as text; "" for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def _mentions(node: ast.expr, names: set[str]) -> bool:
    """True if ``node`` depends on a value in one of ``names``, or in a part of it."""
    if isinstance(node, Function):
        return False
    if isinstance(node, ast.Call) and _dotted(node.func) in _BLIND:
        return False
    if isinstance(node, ast.Compare) and all(isinstance(operator, (ast.Is, ast.IsNot)) for operator in node.ops):
        return False
    if name := _dotted(node):
        parts = name.split(".")
        return any(".".join(parts[:count]) in names for count in range(1, len(parts) + 1))
    return any(_mentions(child, names) for child in _expressions(node))


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield child
        elif not isinstance(child, ast.stmt):  # keywords, comprehensions, slices
            yield from _expressions(child)


def _hangs(test: ast.expr, names: set[str]) -> bool:
    return bool(names) and _mentions(test, names)


def _tests(nodes: Iterable[ast.AST]) -> Iterator[ast.expr]:
    """Conditions, and values that decide the number of iterations."""
    for node in nodes:
        if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.Match):
            yield node.subject
        elif isinstance(node, ast.match_case) and node.guard is not None:
            yield node.guard
        elif isinstance(node, ast.Call) and _dotted(node.func) == "range":
            yield from node.args
