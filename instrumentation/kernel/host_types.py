"""Element types of lane arrays: what Numba infers for each name when one thread runs alone.

The same inference gives ``strict.py`` the types that its rules need, of the kernel and of each device function that
it calls. Nothing is compiled here.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from numba.core import bytecode, errors, interpreter, transforms
from numba.core import types as nb
from numba.core.registry import cpu_target
from numba.core.typed_passes import type_inference_stage
from numba.core.types.misc import CPointer, unliteral
from numba.core.typing.templates import AbstractTemplate, signature
from numba.extending import typeof_impl

from instrumentation.errors import KernelDialectError
from instrumentation.kernel import strict
from instrumentation.kernel.host_pipeline import RememberedTypes
from instrumentation.kernel.lower_host import HostModule, HostOptions, KernelEmitter

if TYPE_CHECKING:
    from instrumentation.kernel.parse import ParsedFunction
    from instrumentation.kernel.plan import KernelPlan


@dataclass(frozen=True)
class Inferred:
    """Typed intermediate code of one function for one tuple of argument types."""

    name: str
    ir: Any
    typemap: dict[str, Any]
    result: Any


def infer(function: Any, arguments: tuple[Any, ...]) -> Inferred:
    """Numba's front end and type inference, without compiling."""
    identity = bytecode.FunctionIdentity.from_function(function)
    ir = interpreter.Interpreter(identity).interpret(bytecode.ByteCode(func_id=identity))
    ir.blocks = transforms.canonicalize_cfg(ir.blocks)
    context = RememberedTypes(cpu_target.typing_context)
    typemap, result, _, _ = type_inference_stage(context, cpu_target.target_context, ir, arguments, None)
    return Inferred(function.__name__, ir, typemap, result)


class TypedHelper:
    """Stands for a device function while types are inferred: Numba learns its result without compiling it."""

    def __init__(self, function: Any) -> None:
        self.inferred: dict[tuple[Any, ...], Inferred] = {}
        helper = self

        class Template(AbstractTemplate):  # type: ignore[misc]
            key = helper

            def generic(self, args: tuple[Any, ...], _kws: dict[str, Any]) -> Any:
                given = tuple(unliteral(a) for a in args)
                if given not in helper.inferred:
                    helper.inferred[given] = infer(function, given)
                return signature(helper.inferred[given].result, *given)

        self.numba_type = nb.Function(Template)


@typeof_impl.register(TypedHelper)
def _typeof_helper(value: TypedHelper, _context: Any) -> Any:
    return value.numba_type


#: by plan and strictness: a kernel is inferred once, whatever the options that it is compiled with
_inferred: WeakKeyDictionary[KernelPlan, dict[bool, dict[str, str]]] = WeakKeyDictionary()


def infer_lane_types(plan: KernelPlan, *, strict_floats: bool) -> dict[str, str]:
    """Element type of each lane array. Raises ``KernelDialectError`` for types that do not fit."""
    known = _inferred.setdefault(plan, {})
    if strict_floats not in known:
        known[strict_floats] = _infer_lane_types(plan, strict_floats=strict_floats)
    return known[strict_floats]


def _infer_lane_types(plan: KernelPlan, *, strict_floats: bool) -> dict[str, str]:
    parsed = plan.parsed
    module = HostModule(HostOptions(), typing=True)
    body = KernelEmitter(module, plan, None).run()
    parameters: list[str] = ["_gx", "_gy", "_gz", "_bx", "_by", "_bz"]
    kinds: list[Any] = [nb.int64] * 6
    for name, kind in plan.signature.items():
        parameters.append(f"v_{name}")
        if isinstance(kind, nb.Array):
            kinds.append(CPointer(kind.dtype))
            parameters += [f"v_{name}_d{axis}" for axis in range(kind.ndim)]
            kinds += [nb.int64] * kind.ndim
        else:
            kinds.append(kind)
    source = module.source([f"def entry({', '.join(parameters)}):", *body, "    return 0"])
    namespace: dict[str, Any] = {"__name__": "refengine_kernel_types"}
    exec(compile(source, f"<types of {parsed.name}>", "exec"), namespace)  # noqa: S102
    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
    marks = [
        int(match[1]) if (match := re.search(r"# line (-?\d+)$", line)) else 0 for line in source.splitlines()
    ]
    try:
        whole = infer(namespace["entry"], tuple(kinds))
    except errors.NumbaError as error:
        _refuse(parsed, error, marks)
    functions = [strict.TypedFunction(parsed, whole, marks)]
    for name, helper in module.parsed.items():
        functions += [strict.TypedFunction(helper, i, marks) for i in namespace[name].inferred.values()]
    strict.check(functions, plan.storage.lanes, floats=strict_floats)
    return _lane_types(plan, whole.typemap)


def _lane_types(plan: KernelPlan, typemap: dict[str, Any]) -> dict[str, str]:
    # Numba numbers the assignments of one name: v_x, v_x.1, ... A lane array holds them all.
    versions: dict[str, set[Any]] = {}
    for variable, kind in typemap.items():
        versions.setdefault(variable.partition(".")[0], set()).add(unliteral(kind))
    found: dict[str, str] = {}
    for name in sorted(plan.storage.lanes):
        kinds = sorted(versions.get(f"v_{name}", {nb.int64}), key=str)  # no type: only dead code assigns it
        whole = [isinstance(kind, nb.Integer | nb.Boolean) for kind in kinds]
        kind = cpu_target.typing_context.unify_types(*kinds)
        numbers = all(isinstance(k, nb.Integer | nb.Boolean | nb.Float) for k in (*kinds, kind))
        mixed = any(whole) != isinstance(kind, nb.Integer | nb.Boolean)
        if not numbers or mixed or whole.count(False) > 1:
            plan.parsed.refuse(
                _assigned_at(plan.parsed, name),
                f"{name.partition('__')[0]!r} is {' and '.join(map(str, kinds))}: a value kept by a thread is one "
                "number type; convert where it is assigned",
            )
        found[name] = "boolean" if isinstance(kind, nb.Boolean) else str(kind)
    for node in plan.parsed.walk():
        # A shuffle moves elements between two lane arrays, the wider of which may be the source.
        if isinstance(node, ast.Assign) and (plan.parsed.collective(node.value) or "barrier") != "barrier":
            assert isinstance(node.value, ast.Call)
            target, source = node.targets[0], node.value.args[1]
            assert isinstance(target, ast.Name)
            assert isinstance(source, ast.Name)
            found[target.id] = found.get(source.id, found[target.id])
    return found


def _assigned_at(parsed: ParsedFunction, name: str) -> int:
    lines = [
        node.lineno
        for node in parsed.walk()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name
    ]
    return max(lines, default=parsed.line)


def _refuse(parsed: ParsedFunction, error: errors.NumbaError, marks: list[int]) -> Any:
    place = getattr(getattr(error, "loc", None), "line", None)
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    if place is None and (found := re.findall(r"<types of [^>]*>\"?, line (\d+)|\((\d+)\)$", text)):
        place = int(found[0][0] or found[0][1])
    line = parsed.line + (marks[place - 1] if place and place <= len(marks) else 0)
    # Numba wraps what an operation says of its arguments into pages about overloads.
    said = re.findall(r"(?:TypingError|NumbaValueError|NumbaTypeError): ([^\n]+)", text)
    rows = [row.strip() for row in text.splitlines() if row.strip()]
    unified = [row for row in rows if "unify" in row.lower()]
    reason = " ".join((said or unified or rows or [type(error).__name__])[:1])
    if not said and ">>> " in text:
        reason += " " + text.partition(">>> ")[2].partition("\n")[0].strip()
    reason = re.sub(r"\bv_(\w+?)(__\d+)*\b", r"\1", reason)
    raise KernelDialectError(
        f"{parsed.file}:{line}: {parsed.name}: the types do not fit: {reason}"
    ) from error
