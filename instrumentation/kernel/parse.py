"""Kernel source -> ``ParsedFunction``: the one front end of every lowering.

Reads a function's source once, checks that it lies inside the kernel dialect (``dialect.py``, docs/kernel-dialect.md)
and brings its body into a normal form (``normalise.py``). Lowerings and audits see only the normal form.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
import types as python_types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numba.core import types as nb

from instrumentation.errors import KernelDialectError
from instrumentation.kernel.intrinsics import Intrinsic
from instrumentation.kernel.origin import hinted_lines, mark_origins
from instrumentation.kernel.tree import walk
from instrumentation.kernel.types import signature_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SHUFFLES = {"shfl_xor_sync": "xor", "shfl_up_sync": "up", "shfl_down_sync": "down", "shfl_sync": "index"}
BARRIERS = {"syncthreads", "syncwarp"}
#: what a line's comment says of a value that is the same in all threads of a block
PROMISE = "uniform: promised"
INDEX_ROOTS = {"threadIdx", "blockIdx", "blockDim", "gridDim", "laneid", "grid", "gridsize"}
BUILTINS = {"range", "min", "max", "abs", "int", "float", "bool", "round"}
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOATS = ("float32", "float64")
NUMBER_TYPES: dict[Any, str] = {
    **{getattr(module, name): name for name in (*_INTEGERS, *_FLOATS) for module in (np, nb)},
    np.bool_: "boolean",
    nb.boolean: "boolean",
}


def number_type(value: Any) -> str | None:
    """``"float32"`` for ``numpy.float32`` and ``numba.float32``; None for what is not a number type."""
    try:
        return NUMBER_TYPES.get(value)
    except TypeError:  # unhashable: a list, an array
        return None


def is_math_function(value: Any) -> bool:
    """Whether a value is a function of the ``math`` module."""
    name = getattr(value, "__name__", None)
    return callable(value) and isinstance(name, str) and getattr(math, name, None) is value


@dataclass(frozen=True)
class LocalArray:
    """An array that a kernel declares: ``space`` is ``"shared"`` or ``"local"``, ``element`` a number type's name."""

    space: str
    shape: tuple[int, ...]
    element: str

    def __post_init__(self) -> None:
        assert self.space in ("shared", "local"), self.space
        assert self.shape, "an array has at least one axis"
        assert all(n > 0 for n in self.shape), self.shape

    @property
    def nbytes(self) -> int:
        """Bytes of one copy: per block when shared, per thread when local."""
        item = 1 if self.element == "boolean" else np.dtype(self.element).itemsize
        return math.prod(self.shape) * item


@dataclass
class ParsedFunction:
    """A kernel or device function in normal form."""

    name: str
    file: str
    line: int
    parameters: list[str]
    body: list[ast.stmt]
    captured: dict[str, Any]
    #: axes of each parameter that is an array; in a device function 0 when only its extents are used
    ranks: dict[str, int]
    arrays: dict[str, LocalArray] = field(default_factory=dict)
    #: its text, and the captured numbers and inlined functions in it
    source: str = ""
    constants: list[str] = field(default_factory=list)
    description: str = ""
    is_kernel: bool = False
    #: a device function that only makes sense inside its caller's body: it waits, or asks which thread it is
    inlined: bool = False

    def refuse(self, node: ast.AST | int, reason: str) -> NoReturn:
        """Raise the one error that says where and why the dialect ends."""
        line = node if isinstance(node, int) else getattr(node, "lineno", self.line)
        raise KernelDialectError(f"{self.file}:{line}: {self.name}: {reason}")

    def resolve(self, node: ast.expr) -> Any:
        """Python value that a dotted captured name stands for, or None when it is a local or a parameter."""
        if isinstance(node, ast.Name):
            return self.captured.get(node.id)
        if isinstance(node, ast.Attribute):
            parent = self.resolve(node.value)
            if isinstance(parent, python_types.ModuleType):
                return getattr(parent, node.attr, None)
        return None

    def cuda_name(self, node: ast.expr) -> str | None:
        """``"threadIdx.x"`` for ``cuda.threadIdx.x``; None when the name does not start at numba.cuda."""
        path: list[str] = []
        while isinstance(node, ast.Attribute):
            path.append(node.attr)
            node = node.value
        root = self.captured.get(node.id) if isinstance(node, ast.Name) else None
        if path and isinstance(root, python_types.ModuleType) and root.__name__ == "numba.cuda":
            return ".".join(reversed(path))
        return None

    def collective(self, node: ast.AST | None) -> str | None:
        """``"barrier"``, ``"xor"``, ``"up"``, ``"down"``, ``"index"`` for a call of a collective, else None."""
        if not isinstance(node, ast.Call):
            return None
        name = self.cuda_name(node.func)
        if name in BARRIERS:
            return "barrier"
        return SHUFFLES.get(name or "")

    def device_function(self, node: ast.AST) -> Any:
        """The ``DeviceFunction`` that a call calls, or None."""
        value = self.resolve(node.func) if isinstance(node, ast.Call) else None
        return value if isinstance(getattr(value, "parsed", None), ParsedFunction) else None

    def has_collective(self, node: ast.AST | list[ast.stmt]) -> bool:
        """Whether a barrier or shuffle stands anywhere inside."""
        return self.first_collective(node if isinstance(node, list) else [node]) is not None

    def first_collective(self, nodes: Sequence[ast.AST]) -> ast.AST | None:
        """The first barrier or shuffle in some nodes."""
        found = (inner for root in nodes for inner in walk(root) if self.collective(inner))
        return min(found, key=lambda node: getattr(node, "lineno", 0), default=None)

    def walk(self) -> Iterator[ast.AST]:
        """Every node of the body."""
        for statement in self.body:
            yield from walk(statement)


def lanes_outside(loop: ast.AST) -> bool:
    """Whether a loop carries the comment ``# lanes: outside``: each thread runs it alone."""
    return bool(getattr(loop, "lanes_outside", False))


def is_promised(statement: ast.AST) -> bool:
    """Whether a statement carries the comment ``# uniform: promised``: its value is the same in all threads."""
    return bool(getattr(statement, "uniform_promised", False))


def parse_function(function: Any, ranks: dict[str, int] | None = None) -> ParsedFunction:
    """Parse, check and normalise. ``ranks``: a kernel's array parameters; None for a device function."""
    # Imported late: both build on the class above.
    from instrumentation.kernel import dialect, normalise  # noqa: PLC0415

    parsed = _read(function)
    parsed.is_kernel = ranks is not None
    try:
        _write_captured_tuples(parsed)
        dialect.check(parsed, _annotated_ranks(function) if ranks is None else ranks)
        normalise.normalise(parsed)
    except RecursionError:
        parsed.refuse(parsed.line, "an expression nested too deeply")
    return parsed


def _annotated_ranks(function: Any) -> dict[str, int]:
    """Axes of parameters that are annotated as arrays: one that is never used has no other sign of its rank."""
    return {name: kind.ndim for name, kind in signature_of(function).items() if isinstance(kind, nb.Array)}


def _write_captured_tuples(parsed: ParsedFunction) -> None:
    """``for j in ROWS`` over a captured tuple of numbers becomes a loop over the literal tuple."""
    for node in parsed.walk():
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Name):
            values = parsed.captured.get(node.iter.id)
            if isinstance(values, tuple) and all(isinstance(v, int | float) for v in values):
                literal = ast.Tuple([ast.Constant(v) for v in values], ast.Load())
                node.iter = ast.fix_missing_locations(ast.copy_location(literal, node.iter))


def _read(function: Any) -> ParsedFunction:
    label = getattr(function, "__qualname__", repr(function))
    if not isinstance(function, python_types.FunctionType):
        raise KernelDialectError(
            f"{label}: {type(function).__name__} is not a plain Python function; decorate a def"
        )
    try:
        lines, first = inspect.getsourcelines(function)
        file = inspect.getsourcefile(function)
    except (OSError, TypeError):
        file = None
    if file is None:
        raise KernelDialectError(
            f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}: {label}: the source cannot be read; "
            "kernels stand in a file, not in a string or a prompt"
        )
    source = textwrap.dedent("".join(lines))
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a lambda inside a call, say
        tree = ast.Module([ast.Pass()], [])
    ast.increment_lineno(tree, first - 1)
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise KernelDialectError(f"{file}:{first}: {label}: a kernel is a plain def")
    body = definition.body
    if (
        isinstance(body[0], ast.Expr)
        and isinstance(body[0].value, ast.Constant)
        and isinstance(body[0].value.value, str)
    ):
        body = body[1:]
    arguments = definition.args
    parsed = ParsedFunction(
        name=definition.name,
        file=file,
        line=definition.lineno,
        parameters=[a.arg for a in (*arguments.posonlyargs, *arguments.args)],
        body=body,
        captured=_captured(function),
        ranks={},
        source=source,
    )
    mark_origins(
        parsed.walk(),
        file=file,
        function=parsed.name,
        source=source,
        first_line=first,
        indentation=len(lines[0]) - len(lines[0].lstrip()),
    )
    hints = hinted_lines(source, first, "lanes: outside")
    promises = hinted_lines(source, first, PROMISE)
    for node in parsed.walk():
        if isinstance(node, ast.For | ast.While) and node.lineno in hints:
            node.lanes_outside = True  # type: ignore[union-attr]
        if isinstance(node, ast.stmt) and node.lineno in promises:
            _promise(parsed, node)
    if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.defaults:
        parsed.refuse(definition, "only plain positional parameters, without defaults")
    return parsed


def _promise(parsed: ParsedFunction, node: ast.stmt) -> None:
    one_name = (
        isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and len(node.targets) == 1
    )
    if not (
        one_name
        or isinstance(node, ast.If)
        or (isinstance(node, ast.For) and isinstance(node.iter, ast.Call))
    ):
        parsed.refuse(
            node,
            f"'# {PROMISE}' stands on an assignment to one name, an if, or a for over range: name the value there",
        )
    node.uniform_promised = True  # type: ignore[attr-defined]


def _captured(function: Any) -> dict[str, Any]:
    """Values of the names that a function takes from outside, as they are now."""
    code = function.__code__
    names = dict(function.__globals__)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            names[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            names.pop(name, None)
    # co_names holds attribute names too: a parameter x and a threadIdx.x must not find a global x.
    used = (set(code.co_names) | set(code.co_freevars)) - set(code.co_varnames) - set(code.co_cellvars)
    return {name: names[name] for name in used if name in names}


def describe(parsed: ParsedFunction) -> str:
    """Everything about a parsed function that its lowerings depend on, as text. Free of absolute lines."""
    if not parsed.description:
        parts = [parsed.source, *parsed.constants, repr(sorted(parsed.arrays.items()))]
        used = {n.id for n in parsed.walk() if isinstance(n, ast.Name)}
        for name in sorted(used & set(parsed.captured)):
            value = parsed.captured[name]
            if isinstance(getattr(value, "parsed", None), ParsedFunction):
                parts.append(f"{name}={describe(value.parsed)}")
            elif isinstance(value, Intrinsic):
                parts.append(f"{name}={value!r}")
            else:
                parts.append(f"{name}={number_type(value) or getattr(value, '__name__', value)}")
        parsed.description = "\n".join(parts)
    return parsed.description
