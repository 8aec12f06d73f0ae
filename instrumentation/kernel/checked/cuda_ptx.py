"""Checks in the PTX of a checked kernel: those of neighbouring accesses become one branch, to where they are looked at.

An access leaves a mark: whether something is wrong with it, and what a report would say. What stands between two marks
of a basic block runs in any case, so all marks up to its end, or up to where one of their registers changes, are tested
together. The way that is taken where something is wrong stands behind the kernel, and calls a function for each mark.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from instrumentation.errors import DeviceError
from instrumentation.kernel.checked.report_cuda import recorder, recorder_name

#: what stands in PTX for a check: whether the access is outside, what is odd of its memory's state, key, form, state;
#: then indices, extents. A form is the bytes of a state, and whether it does not matter if they were written
MARK = "REFENGINE_CHECK"
#: marks that are tested together: what they need stays in registers until then
MOST_TOGETHER = 8
_ENTRY = re.compile(r"\.visible\s+\.entry\s+[^\s(]+\s*\(([^)]*)\)")
_PARAMETER = re.compile(r"\.param\s+\.[usbf]\d+\s+([^\s,()]+)")
_MARKED = re.compile(rf"^\s*{MARK}\s+([^;]*);")
#: an instruction, or several of one piece of inline assembly: what it may change is what it names first
_CHANGED = re.compile(r"(?:@!?%\w+\s+)?[a-z][\w.:]*\s+(\{[^}]*\}|%\w+(?:\|%\w+)?)")
_ENDS = re.compile(r"^\s*(?:@!?%\w+\s+)?(?:bra|brx|ret|exit|trap)\b|^\s*[$\w]+:|^\s*\}")
_NAME = re.compile(r"%\w+")
_FALSE = re.compile(r"mov\.(pred|[ub]32)\s+(%\w+), 0;")
_FLAG = re.compile(r"selp\.u32\s+(%\w+), 1, 0, (%\w+);")
#: how ``checked.cuda_access`` writes an instruction with a predicate
_IF = re.compile(r"\{ \.reg \.pred rf_p; setp\.ne\.b32 rf_p, (%\w+), 0; (.*?) \}")
_NEVER = re.compile(r"@rf_p [^;]*;")
_FIXED = 5  # operands of a mark before its indices


@dataclass
class _Group:
    """Marks that are tested together."""

    marks: list[tuple[str, ...]] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        return {name for mark in self.marks for operand in mark[2:] for name in _NAME.findall(operand)}


class _Kernel:
    """The text of one kernel while its checks are put in."""

    def __init__(self, report: str) -> None:
        self.report = report
        self.lines: list[str] = []
        self.cold: list[str] = []
        self.group = _Group()
        self.axes: set[int] = set()
        self.number = self.extra = 0
        #: numbers that are 1 where a predicate holds, else 0; predicates that never do, and numbers that are 0
        self.flags: dict[str, str] = {}
        self.false: set[str] = set()
        self.zero: set[str] = set()

    def add(self, line: str) -> None:
        """One more line of the compiler's."""
        text = line.strip()
        if not text or text.startswith("//"):
            return
        marked = _MARKED.match(text)
        if marked:
            number, *rest = (operand.strip() for operand in marked[1].split(","))
            self._mark((self._predicate(number), *rest))
            return
        changed = _changes(text)
        if self.group.marks and (_ENDS.match(text) or changed & self.group.names):
            self.flush()
        if _ENDS.match(text):
            self.flags = {}
        for register in changed:
            self.flags = {
                number: flag for number, flag in self.flags.items() if register not in (number, flag)
            }
        flag = _FLAG.match(text)
        if flag:
            self.flags[flag[1]] = flag[2]
        never = _FALSE.match(text)
        if never:
            (self.false if never[1] == "pred" else self.zero).add(never[2])
        text = _IF.sub(self._short, text)
        self.lines.append(text)

    def _short(self, match: re.Match[str]) -> str:
        """Instructions with a predicate, without the number that brought it here; without those that never run."""
        flag = self._predicate(match[1])
        return _NEVER.sub("", match[2]) if flag in self.zero else match[2].replace("@rf_p", f"@{flag}")

    def _predicate(self, number: str) -> str:
        """The predicate that a number stands for."""
        flag = self.flags.get(number)
        if flag is None and number in self.zero:
            return number
        if flag is None:
            self.extra += 1
            flag = f"%rf_flag{self.extra}"
            self.lines.append(f"setp.ne.b32 {flag}, {number}, 0;")
        return flag

    def _mark(self, mark: tuple[str, ...]) -> None:
        marks = self.group.marks
        outside, odd = ({other[i] for other in marks} for i in range(2))
        if not marks:
            self.lines += ["mov.pred %rf_outside, 0;", "mov.b32 %rf_odd, 0;"]
        if mark[0] not in outside | self.false | self.zero:
            self.lines.append(f"or.pred %rf_outside, %rf_outside, {mark[0]};")
        if mark[1] not in odd | self.zero:
            self.lines.append(f"or.b32 %rf_odd, %rf_odd, {mark[1]};")
        marks.append(mark)
        if len(set(marks)) >= MOST_TOGETHER:
            self.flush()

    def flush(self) -> None:
        """Test what was marked."""
        marks, self.group = self.group.marks, _Group()
        if not marks:
            return
        self.number += 1
        self.lines += [
            "setp.ne.or.b32 %rf_wrong, %rf_odd, 0, %rf_outside;",
            f"@%rf_wrong bra RF_FOUND_{self.number};",
            f"RF_ON_{self.number}:",
        ]
        self.cold += [f"RF_FOUND_{self.number}:", f"ld.param.u64 %rf_report, [{self.report}];"]
        for mark, times in Counter(marks).items():
            axes = (len(mark) - _FIXED) // 2
            self.axes.add(axes)
            values = ["%rf_report", str(times), *mark[2:]]
            given = [f"rf_{i}" for i in range(len(values))]
            self.cold += [
                "{",
                f".param .b64 {', '.join(given)};",
                *(f"st.param.b64 [{place}], {value};" for place, value in zip(given, values, strict=True)),
                f"call {recorder_name(axes)}, ({', '.join(given)});",
                "}",
            ]
        self.cold.append(f"bra RF_ON_{self.number};")


def with_checks(ptx: str, report: int) -> str:
    """PTX of one checked kernel with its checks; ``report``: number of the parameter that is the report's address.

    Raises ``DeviceError`` when there is no kernel in it.
    """
    entry = _ENTRY.search(ptx)
    if entry is None:
        raise DeviceError("no entry in PTX; a kernel was wanted")
    start = ptx.index("{", entry.end())
    kernel = _Kernel(_PARAMETER.findall(entry[1])[report])
    for line in ptx[start + 1 :].splitlines():
        kernel.add(line)
    end = max(i for i, line in enumerate(kernel.lines) if line.strip() == "}")
    declared = [
        f".reg .pred %rf_wrong, %rf_outside, %rf_flag<{kernel.extra + 1}>;",
        ".reg .b32 %rf_odd;",
        ".reg .b64 %rf_report;",
    ]
    functions = [recorder(axes) for axes in sorted(kernel.axes)]
    return "\n".join(
        [
            ptx[: entry.start()], *functions, ptx[entry.start() : start + 1], *declared,
            *kernel.lines[:end], *kernel.cold, *kernel.lines[end:], "",
        ]
    )  # fmt: skip


def _changes(line: str) -> set[str]:
    """Registers that a line may change."""
    return {name for each in _CHANGED.findall(line) for name in _NAME.findall(each)}
