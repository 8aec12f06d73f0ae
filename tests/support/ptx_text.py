"""A function of PTX becomes one of Python, which ``ptx_machine`` runs; a method ``_on_…`` for each instruction."""

from __future__ import annotations

import math
import re
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LOCAL = re.compile(r"\.local\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d+)\]")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+([^;]+);")
MASKS = {8: 0xFF, 16: 0xFFFF, 32: 0xFFFFFFFF, 64: 0xFFFFFFFFFFFFFFFF}
FORMATS = {"f32": "<f", "f64": "<d"}
#: where addresses of shared and local memory begin
SHARED, LOCAL = 1 << 20, 1 << 21
_COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_LIKE = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^"}


def signed(value: Any, kind: str) -> Any:
    if kind[0] != "s":
        return value
    bits = int(kind[1:])
    value &= MASKS[bits]
    return value - (1 << bits) if value >> (bits - 1) else value


def rounded(value: float) -> float:
    """The nearest float32."""
    try:
        number: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return number


def divided(a: float, b: float) -> float:
    try:
        return a / b
    except ZeroDivisionError:
        return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1, b)


def bits_of(value: float, kind: str) -> int:
    return int.from_bytes(struct.pack(FORMATS[kind], value), "little")


def float_of(bits: int, kind: str) -> float:
    size = int(kind[1:])
    number: float = struct.unpack(FORMATS[kind], (bits & MASKS[size]).to_bytes(size // 8, "little"))[0]
    return number


def quotient(a: int, b: int) -> int:
    return 0 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def whole(value: float) -> int:
    return 0 if math.isnan(value) else int(max(min(value, 2.0**63), -(2.0**63)))


NAMES = {
    "S": signed, "R": rounded, "D": divided, "B": bits_of, "F": float_of, "Q": quotient, "W": whole, "math": math,
    "struct": struct,
}  # fmt: skip


class Function:
    """Python text of one function."""

    def __init__(
        self, name: str, parameters: list[tuple[str, str]], body: str, places: dict[str, int]
    ) -> None:
        self.name = name
        self.kinds: dict[str, str] = {}
        self.places = dict(places)
        at = LOCAL
        for align, local, size in _LOCAL.findall(body):
            at = -(-at // int(align)) * int(align)
            self.places[local] = at
            at += int(size)
        self.local_bytes = at - LOCAL
        for kind, names in _REGISTERS.findall(body):
            for each in names.split(","):
                self._declare(kind, each.strip())
        self.parameters = {name: kind for kind, name in parameters}
        self.waits = False
        blocks: list[list[str]] = [[]]
        self.labels: dict[str, int] = {}
        for text in self._statements(body):
            if text.endswith(":"):
                blocks.append([])
                self.labels[text[:-1]] = len(blocks) - 1
            else:
                blocks[-1].append(text)
        lines = [f"def {name_of(name)}(t, {', '.join(['g', *map(name_of, self.parameters)])}):"]
        lines += [
            f"    {name_of(each)} = {'0.0' if kind[0] == 'f' else '0'}" for each, kind in self.kinds.items()
        ]
        lines += ["    pc = 0", "    while True:"]
        for number, block in enumerate(blocks):
            lines.append(f"        if pc <= {number}:")
            lines += [f"            {line}" for text in block for line in self._code(text)]
            lines.append("            pass")
        self.text = "\n".join([*lines, "        return", ""])

    def _declare(self, kind: str, name: str) -> None:
        many = re.fullmatch(r"(%\w+?)<(\d+)>", name)
        for each in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]:
            self.kinds[each] = kind

    @staticmethod
    def _statements(body: str) -> Iterator[str]:
        for line in body.splitlines():
            text = line.split("//")[0].strip()
            text = text if "{%" in text else text.strip("{}").strip()
            label = re.match(r"([$\w]+:)(?!:)\s*", text)
            if label:
                yield label[1]
                text = text[label.end() :]
            for part in text.split(";"):
                if part.strip() and not part.strip().startswith("."):
                    yield part.strip()

    # --- operands

    def _value(self, text: str, kind: str) -> str:  # noqa: PLR0911 - a form of an operand each
        """Expression of an operand read as a type."""
        text = text.strip()
        if text.startswith("-%"):
            return f"(-{self._value(text[1:], kind)})"
        if text in self.kinds:
            own = self.kinds[text]
            if kind[0] == "f" and own[0] == "b":
                return f"F({name_of(text)}, '{kind}')"
            if kind[0] == "s":
                return f"S({name_of(text)}, '{kind}')"
            if kind[0] in "bu" and own[0] == "f":
                return f"B({name_of(text)}, '{own}')"
            if kind[0] in "bu" and kind != "b1" and own != "pred":
                return f"({name_of(text)} & {MASKS[int(kind[1:])]})"
            return name_of(text)
        if text.startswith("%"):
            return f"t.special['{text}']"
        if re.fullmatch(r"0[fd][0-9A-Fa-f]+", text):
            width = "f32" if text[1] == "f" else "f64"
            return f"F(0x{text[2:]}, '{width}')"
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", text):
            number = int(text, 0)
            bits = int(kind[1:]) if kind[0] in "bu" and kind != "b1" else 64
            return str(number) if kind[0] == "s" else str(number & MASKS[bits])
        if text in self.places:
            return str(self.places[text])
        return name_of(text)

    def _address(self, text: str) -> str:
        inner = text.strip().strip("[]")
        base, plus, offset = inner.partition("+")
        return f"({self._value(base, 'u64')} + {offset})" if plus else self._value(base, "u64")

    def _set(self, target: str, value: str) -> str:
        kind = self.kinds[target]
        if kind == "f32":
            return f"{name_of(target)} = R({value})"
        if kind[0] == "f":
            return f"{name_of(target)} = {value}"
        if kind == "pred":
            return f"{name_of(target)} = bool({value})"
        return f"{name_of(target)} = ({value}) & {MASKS[int(kind[1:])]}"

    # --- instructions

    def _code(self, text: str) -> list[str]:
        condition = re.match(r"@(!?)(%\w+)\s+", text)
        if condition:
            rest = self._code(text[condition.end() :])
            return [
                f"if {'not ' if condition[1] else ''}{name_of(condition[2])}:",
                *(f"    {line}" for line in rest),
            ]
        operation, _, rest = text.partition(" ")
        operation, rest = operation.strip(), rest.strip()
        if "\t" in operation:
            operation, _, more = operation.partition("\t")
            rest = f"{more} {rest}".strip()
        parts = operation.split(".")
        operands = _split(rest)
        handler = getattr(self, f"_on_{parts[0]}", None)
        if handler is None:
            raise NotImplementedError(text)
        result = handler(parts, operands)
        return result if isinstance(result, list) else [result]

    def _on_bra(self, _parts: list[str], operands: list[str]) -> list[str]:
        return [f"pc = {self.labels[operands[0]]}", "continue"]

    def _on_ret(self, _parts: list[str], _operands: list[str]) -> str:
        return "return"

    _on_exit = _on_ret

    def _on_cp(self, _parts: list[str], _operands: list[str]) -> str:
        """A fetch into a cache."""
        return "pass"

    def _on_griddepcontrol(self, _parts: list[str], _operands: list[str]) -> str:
        return "pass"

    def _on_bar(self, parts: list[str], _operands: list[str]) -> str:
        self.waits = True
        return "yield ('warp',)" if parts[1] == "warp" else "yield ('block',)"

    def _on_shfl(self, parts: list[str], operands: list[str]) -> list[str]:
        self.waits = True
        target, *predicate = operands[0].split("|")
        value, lane, clamp = (self._value(each, "u32") for each in operands[1:4])
        lines = [f"got = yield ('{parts[2]}', {value}, {lane}, {clamp})", self._set(target, "got[0]")]
        return lines + [self._set(each, "got[1]") for each in predicate]

    def _on_call(self, _parts: list[str], operands: list[str]) -> str:
        given = [each.strip() for each in operands[1].strip("()").split(",")]
        return f"g['{name_of(operands[0])}'](t, g, {', '.join(name_of(each) for each in given)})"

    def _on_mov(self, parts: list[str], operands: list[str]) -> list[str] | str:
        kind, (target, source) = parts[-1], operands
        if target.startswith("{"):
            half = int(kind[1:]) // 2
            low, high = (each.strip() for each in target.strip("{}").split(","))
            whole = self._value(source, kind)
            return [f"got = {whole}", self._set(low, "got"), self._set(high, f"got >> {half}")]
        if source.startswith("{"):
            half = int(kind[1:]) // 2
            low, high = (self._value(each, f"u{half}") for each in source.strip("{}").split(","))
            return self._set(target, f"{low} | ({high} << {half})")
        own = self.kinds[target]
        if own[0] == "f":
            return self._set(target, self._value(source, own))
        return self._set(target, self._value(source, "b1" if own == "pred" else kind.replace("f", "b")))

    def _on_ld(self, parts: list[str], operands: list[str]) -> list[str] | str:
        kind = parts[-1]
        if "param" in parts:
            name = operands[1].strip("[]")
            declared = self.parameters.get(name, kind)
            if declared[0] == "f":
                return self._set(operands[0], f"F({name_of(name)}, '{declared}')")
            return self._set(operands[0], self._value_of_parameter(name, kind))
        space = next((s for s in ("global", "shared", "local") if s in parts), "")
        return self._memory(
            parts, operands[0], lambda at: f"t.load('{space}', '{kind}', {at})", operands[1], kind
        )

    def _value_of_parameter(self, name: str, kind: str) -> str:
        return (
            f"S({name_of(name)}, '{kind}')"
            if kind[0] == "s"
            else f"({name_of(name)} & {MASKS[int(kind[1:])]})"
        )

    def _memory(
        self, parts: list[str], target: str, made: Callable[[str], str], place: str, kind: str
    ) -> list[str]:
        names = [each.strip() for each in target.strip("{}").split(",")]
        lines = [f"at = {self._address(place)}"]
        for i, name in enumerate(names):
            value = made(f"at + {i * int(kind[1:]) // 8}")
            if kind[0] == "s":
                value = f"S({value}, '{kind}')"
            if kind[0] == "f" and self.kinds[name][0] != "f":
                value = f"B({value}, '{kind}')"
            if kind[0] != "f" and self.kinds[name][0] == "f":
                value = f"F({value}, '{self.kinds[name]}')"
            lines.append(self._set(name, value))
        assert len(names) == 1 or {"v2", "v4"} & set(parts), parts
        return lines

    def _on_st(self, parts: list[str], operands: list[str]) -> list[str] | str:
        kind = parts[-1]
        if "param" in parts:
            return f"{name_of(operands[0].strip('[]'))} = {self._value(operands[1], kind)}"
        space = next((s for s in ("global", "shared", "local") if s in parts), "")
        sources = [each.strip() for each in operands[1].strip("{}").split(",")]
        lines = [f"at = {self._address(operands[0])}"]
        for i, source in enumerate(sources):
            lines.append(
                f"t.store('{space}', '{kind}', at + {i * int(kind[1:]) // 8}, {self._value(source, kind)})"
            )
        return lines

    def _on_atom(self, parts: list[str], operands: list[str]) -> str:
        kind, space, operation = parts[-1], parts[1], parts[2]
        values = ", ".join(self._value(each, kind) for each in operands[2:])
        address = self._address(operands[1])
        return self._set(operands[0], f"t.atomic('{space}', '{operation}', '{kind}', {address}, {values})")

    def _on_setp(self, parts: list[str], operands: list[str]) -> str:
        kind = parts[-1]
        target, a, b = operands[0], self._value(operands[1], kind), self._value(operands[2], kind)
        compared = parts[1]
        if compared in ("nan", "num"):
            value = f"(math.isnan({a}) or math.isnan({b}))"
            value = value if compared == "nan" else f"not {value}"
        elif kind[0] == "f" and compared == "ne":
            value = f"({a} < {b} or {a} > {b})"
        elif kind[0] == "f" and compared.endswith("u"):
            value = f"({a} {_COMPARED[compared[:-1]]} {b} or math.isnan({a}) or math.isnan({b}))"
        else:
            value = f"({a} {_COMPARED[compared]} {b})"
        if len(operands) > 3:
            negated = operands[3].startswith("!")
            other = name_of(operands[3].strip("! "))
            value = f"{value} {parts[2]} {'not ' if negated else ''}{other}"
        return self._set(target, value)

    def _on_selp(self, parts: list[str], operands: list[str]) -> str:
        kind = self.kinds[operands[0]] if self.kinds[operands[0]][0] == "f" else parts[-1].replace("s", "u")
        a, b = (self._value(each, kind) for each in operands[1:3])
        return self._set(operands[0], f"{a} if {name_of(operands[3])} else {b}")

    def _simple(self, parts: list[str], operands: list[str]) -> str:
        kind, name = parts[-1], parts[0]
        if kind == "pred":
            a, b = (name_of(each) for each in operands[1:3])
            return self._set(operands[0], f"{a} {_LIKE[name]} {b}")
        a, b = (self._value(each, kind) for each in operands[1:3])
        return self._set(operands[0], f"{a} {_LIKE[name]} {b}")

    _on_add = _on_sub = _on_and = _on_or = _on_xor = _simple

    def _on_mul(self, parts: list[str], operands: list[str]) -> str:
        kind = parts[-1]
        a, b = (self._value(each, kind) for each in operands[1:3])
        product = f"({a} * {b})"
        return self._set(operands[0], f"{product} >> {kind[1:]}" if "hi" in parts else product)

    def _on_mad(self, parts: list[str], operands: list[str]) -> str:
        kind = parts[-1]
        a, b = (self._value(each, kind) for each in operands[1:3])
        wide = f"{kind[0]}{2 * int(kind[1:])}" if "wide" in parts else kind
        return self._set(operands[0], f"{a} * {b} + {self._value(operands[3], wide)}")

    def _on_fma(self, parts: list[str], operands: list[str]) -> str:
        a, b, c = (self._value(each, parts[-1]) for each in operands[1:4])
        return self._set(operands[0], f"{a} * {b} + {c}")

    def _on_div(self, parts: list[str], operands: list[str]) -> str:
        kind = parts[-1]
        a, b = (self._value(each, kind) for each in operands[1:3])
        return self._set(operands[0], f"D({a}, {b})" if kind[0] == "f" else f"Q({a}, {b})")

    def _on_rem(self, parts: list[str], operands: list[str]) -> str:
        a, b = (self._value(each, parts[-1]) for each in operands[1:3])
        return self._set(operands[0], f"{a} - Q({a}, {b}) * {b}")

    def _on_rcp(self, parts: list[str], operands: list[str]) -> str:
        return self._set(operands[0], f"D(1.0, {self._value(operands[1], parts[-1])})")

    def _on_sqrt(self, parts: list[str], operands: list[str]) -> str:
        value = self._value(operands[1], parts[-1])
        return self._set(operands[0], f"math.sqrt({value}) if {value} >= 0 else math.nan")

    def _on_neg(self, parts: list[str], operands: list[str]) -> str:
        return self._set(operands[0], f"-{self._value(operands[1], parts[-1])}")

    def _on_abs(self, parts: list[str], operands: list[str]) -> str:
        return self._set(operands[0], f"abs({self._value(operands[1], parts[-1])})")

    def _on_not(self, parts: list[str], operands: list[str]) -> str:
        if parts[-1] == "pred":
            return self._set(operands[0], f"not {name_of(operands[1])}")
        return self._set(operands[0], f"~{self._value(operands[1], parts[-1])}")

    def _extreme(self, parts: list[str], operands: list[str]) -> str:
        kind = parts[-1]
        a, b = (self._value(each, kind) for each in operands[1:3])
        if kind[0] == "f":
            chosen = f"{a} if math.isnan({b}) else {parts[0]}({a}, {b})"
            return self._set(operands[0], f"{b} if math.isnan({a}) else {chosen}")
        return self._set(operands[0], f"{parts[0]}({a}, {b})")

    _on_min = _on_max = _extreme

    def _on_shl(self, parts: list[str], operands: list[str]) -> str:
        value, by = self._value(operands[1], parts[-1]), self._value(operands[2], "u32")
        return self._set(operands[0], f"{value} << min({by}, {parts[-1][1:]})")

    def _on_shr(self, parts: list[str], operands: list[str]) -> str:
        value, by = self._value(operands[1], parts[-1]), self._value(operands[2], "u32")
        return self._set(operands[0], f"{value} >> min({by}, {parts[-1][1:]})")

    def _on_bfe(self, parts: list[str], operands: list[str]) -> str:
        assert parts[-1][0] == "u", parts
        value, at, length = (self._value(each, parts[-1]) for each in operands[1:4])
        return self._set(operands[0], f"({value} >> {at}) & ((1 << {length}) - 1)")

    def _on_bfi(self, parts: list[str], operands: list[str]) -> str:
        a, b, at, length = (self._value(each, parts[-1].replace("b", "u")) for each in operands[1:5])
        mask = f"(((1 << {length}) - 1) << {at})"
        return self._set(operands[0], f"(({a} << {at}) & {mask}) | ({b} & ~{mask})")

    def _on_cvta(self, _parts: list[str], operands: list[str]) -> str:
        return self._set(operands[0], self._value(operands[1], "u64"))

    def _on_cvt(self, parts: list[str], operands: list[str]) -> str:
        to, of = parts[-2], parts[-1]
        if of == "f16":
            half = self._value(operands[1], "u16")
            return self._set(operands[0], f"struct.unpack('<e', struct.pack('<H', {half}))[0]")
        value = self._value(operands[1], of)
        if to == "f16":
            return self._set(operands[0], f"struct.unpack('<H', struct.pack('<e', {value}))[0]")
        if of[0] == "f" and to[0] != "f":
            return self._set(operands[0], f"W({value})")
        return self._set(operands[0], value)


def _split(text: str) -> list[str]:
    """Operands between commas, but for those in brackets."""
    found, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "{[(") - (letter in "}])")
        if letter == "," and depth == 0:
            found.append(text[start:i].strip())
            start = i + 1
    return [*found, text[start:].strip()] if text else []


def name_of(text: str) -> str:
    return "v_" + re.sub(r"\W", "_", text)
