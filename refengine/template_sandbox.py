"""The sandbox of chat templates: what a template may use, and the budget behind everything that it does.

Jinja's immutable sandbox, with the filters and methods that chat templates use and no others. Everything that
can repeat (loops, calls) or grow (strings, lists) pays for itself, most of it before it happens.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import jinja2
from jinja2 import nodes, pass_context, pass_environment
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.runtime import BlockReference, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from refengine.template_budget import STEP, BudgetError, charge, charge_value

if TYPE_CHECKING:
    from jinja2.parser import Parser
    from jinja2.runtime import Context

_MAX_INT_BITS: Final = 4096

# No counterpart here of center, zfill, format, batch and the like: nothing in a prompt needs them, and each
# makes something huge out of one small argument.
_STR_METHODS: Final = frozenset(
    "capitalize count endswith find index isalnum isalpha isdecimal isdigit islower isnumeric "  # noqa: SIM905
    "isspace isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition "
    "rsplit rstrip split splitlines startswith strip swapcase title upper".split()
)
_METHODS: Final[tuple[tuple[type | tuple[type, ...], frozenset[str]], ...]] = (
    (str, _STR_METHODS),
    (Mapping, frozenset({"get", "items", "keys", "values"})),
    ((list, tuple), frozenset({"count", "index"})),
    ((int, float, bytes, range, types.NoneType), frozenset()),
)
_PLAIN_FILTERS: Final = frozenset(
    "abs capitalize count d default dictsort e escape first float int items last length list lower "  # noqa: SIM905
    "map max min reject rejectattr reverse safe select selectattr sort string title trim unique upper "
    "wordcount".split()
)
_CONVERSION: Final = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\*|\d*)(?:\.(\*|\d*))?")


class RefusedByTemplateError(jinja2.TemplateError):
    """The template called ``raise_exception``."""


def compile_template(source: str) -> jinja2.Template:
    """Return the template, to be rendered under ``spending``. Raises whatever Jinja and Python raise."""
    environment = Environment()
    tree = environment.parse(source)
    environment.note_weights(tree)
    tree = _Metering().visit(tree)
    tree.set_environment(environment)
    code = environment.compile(tree, filename="<tokenizer.chat_template>")
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


def one_line(error: object) -> str:
    """Return a message for one line of a terminal."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."


class _GenerationTag(Extension):
    """``{% generation %}`` marks what the model wrote, for training. For a prompt its body is all it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with everything that costs going through the budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # folding constants would run filters while compiling
            finalize=_finalize,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
        )
        self._whole_weight = 0
        self._macro_weights: dict[str, int] = {}
        self.globals = {
            "range": self.globals["range"],
            "dict": dict,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self.filters = {name: _charged(self.filters[name]) for name in _PLAIN_FILTERS} | {
            "format": _charged(_format),
            "indent": _charged(_indent),
            "join": _join,
            "replace": _charged(_replace),
            "round": _charged(functools.partial(_round, self.filters["round"])),
            "tojson": _charged(_tojson),
            _COUNTED: _counted,
            _MADE: _made,
            _CONCATENATED: _concatenated,
        }

    def note_weights(self, tree: nodes.Template) -> None:
        """Remember what running the template's body and each macro's body once costs."""
        self._whole_weight = _body_weight(tree)
        for macro in tree.find_all(nodes.Macro):
            self._macro_weights[macro.name] = self._macro_weights.get(macro.name, 0) + _body_weight(macro)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join what a body wrote."""
        pieces = list(parts)
        charge(sum(map(len, pieces)))
        return "".join(pieces)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow what templates use on the types of JSON, and the sandbox's choice on Jinja's own objects."""
        for kind, allowed in _METHODS:
            if isinstance(obj, kind):
                return attr in allowed
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Refuse at once: by default an unsafe attribute that is only printed passes as empty."""
        raise SecurityError(f"access to {attribute!r} of a value of type {type(obj).__name__}")

    def wrap_str_format(self, value: Any) -> None:
        """Leave ``str.format`` to ``is_safe_attribute``, which refuses it: its widths have no bound."""

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Pay for the result of an operator that can make a value grow."""
        if operator == "%" and isinstance(left, str):
            _check_conversions(left)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            bits = bits * abs(right) if operator == "**" else bits + right.bit_length()
            if bits > _MAX_INT_BITS:
                raise BudgetError(f"an integer of more than {_MAX_INT_BITS} bits")
        elif operator == "*":
            for sized, times in ((left, right), (right, left)):
                if isinstance(sized, (str, list, tuple)) and isinstance(times, int):
                    charge(len(sized) * max(times, 0))
        elif operator == "+" and isinstance(left, (str, list, tuple)):
            charge(len(left) + (len(right) if isinstance(right, (str, list, tuple)) else 0))
        return charge_value(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Pay for a call: for what a macro's body costs, and for what comes back."""
        owner = getattr(obj, "__self__", None)
        if isinstance(obj, types.BuiltinMethodType) and isinstance(owner, str):
            if obj.__name__ == "replace":
                # Jinja adds the variables of the loop or block around to the arguments of every call.
                kwargs = {name: value for name, value in kwargs.items() if name not in _JINJA_ARGUMENTS}
                return charge_value(_replace(owner, *args, **kwargs))
            if obj.__name__ == "join":
                (parts,) = args
                return _joined(parts, owner)
        charge(STEP)
        if isinstance(obj, Macro):
            charge(self._macro_weights.get(obj.name, self._whole_weight))
        elif isinstance(obj, BlockReference):
            charge(self._whole_weight)
        return charge_value(super().call(context, obj, *args, **kwargs))


class _Namespace(Namespace):
    def __repr__(self) -> str:
        # The default prints the contents, and namespaces that share contents can nest to any size.
        return "<Namespace>"


_JINJA_ARGUMENTS: Final = frozenset({"_loop_vars", "_block_vars"})
_COUNTED: Final = "counted loop"
_MADE: Final = "made value"
_CONCATENATED: Final = "concatenated parts"


class _Metering(NodeTransformer):
    """Rewrites a template's tree so that its loops, literals, slices and ``~`` go through the budget."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja2's interface
        if node.recursive:
            raise jinja2.TemplateSyntaxError("recursive loops are not built", node.lineno)
        weight = _body_weight(node)
        self.generic_visit(node)
        node.iter = _through(_COUNTED, node.iter, nodes.Const(weight, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _through(_CONCATENATED, nodes.List(node.nodes, lineno=node.lineno))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _through(_MADE, node) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _through(_MADE, node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _through(_MADE, node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _through(_MADE, node) if node.ctx == "load" else node

    def _refuse(self, node: nodes.Stmt) -> nodes.Node:
        raise jinja2.TemplateSyntaxError("a chat template has no other templates to load", node.lineno)

    visit_Include = visit_Import = visit_FromImport = visit_Extends = _refuse  # noqa: N815


def _through(name: str, node: Any, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _body_weight(node: nodes.Node) -> int:
    """Return an upper bound of the pieces and the static text that running ``node``'s body once puts out."""
    return STEP + sum(
        len(child.data) if isinstance(child, nodes.TemplateData) else 1 for child in node.find_all(nodes.Node)
    )


@pass_context
def _counted(_: Context, iterable: Any, weight: int) -> Any:
    weight = max(weight, STEP)
    if hasattr(iterable, "__len__"):
        charge(len(iterable) * weight)
        return iterable

    def items() -> Iterator[Any]:
        for item in iterable:
            charge(weight)
            yield item

    return items()


@pass_context
def _made(_: Context, value: Any) -> Any:
    return charge_value(value)


@pass_context
def _finalize(_: Context, value: Any) -> str:
    # As a context function it also keeps Jinja from evaluating constant output while compiling.
    return charge_value(str(value))


@pass_context
def _concatenated(_: Context, parts: Sequence[Any]) -> str:
    return _joined(parts, "")


def _joined(parts: Iterable[Any], separator: str) -> str:
    pieces = []
    for part in parts:
        text = str(part)
        charge(STEP + len(text) + len(separator))
        pieces.append(text)
    return separator.join(pieces)


def _charged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # copies the mark of what Jinja passes first
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        charge(STEP)
        return charge_value(function(*args, **kwargs))

    return wrapper


@pass_environment
def _join(
    environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return _joined(value, str(d))


def _replace(value: object, old: str, new: str, count: int | None = None) -> str:
    text = str(value)
    times = text.count(old) if count is None or count < 0 else min(count, text.count(old))
    charge(len(text) + times * len(new))
    return text.replace(old, new, times)


def _format(text: Any, *args: Any, **kwargs: Any) -> str:
    _check_conversions(str(text))
    return str(str(text) % (kwargs or args))


def _check_conversions(text: str) -> None:
    for width, precision in _CONVERSION.findall(text):
        if any(size == "*" or len(size) > 2 for size in (width, precision)):
            raise BudgetError("a % conversion wider than 99 characters")


def _indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text, prefix_size = str(text), width if isinstance(width, int) else len(width)
    charge((text.count("\n") + 1) * max(prefix_size, 0))
    prefix = " " * width if isinstance(width, int) else width
    lines = [prefix + line if line or blank else line for line in text.split("\n")]
    if not first:
        lines[0] = text.split("\n", 1)[0]
    return "\n".join(lines)


def _round(function: Callable[..., Any], value: Any, precision: int = 0, method: str = "common") -> Any:
    if abs(precision) > 30:
        raise BudgetError(f"rounding to {precision} digits")
    return function(value, precision, method)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as models were trained on it; Jinja's own filter escapes for HTML."""
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= 16):
        raise BudgetError("tojson with an indent that is not 0 to 16")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object = "") -> None:
    raise RefusedByTemplateError(one_line(message))


def _strftime_now(pattern: str) -> str:
    # A number in a conversion is a width on some systems.
    if len(pattern) > 100 or re.search(r"%[^A-Za-z%]*\d", pattern):
        raise BudgetError("strftime_now with a pattern that is longer than 100 characters or has widths")
    return dt.datetime.now().astimezone().strftime(pattern)
