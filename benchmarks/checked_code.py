"""What the checks of level ``trap`` cost on CUDA as far as machine code shows it: no GPU is needed.

usage: python benchmarks/checked_code.py [--sass FOLDER] [--out FILE.json] [KERNEL ...]

A row for the plain and the checked form of each kernel, for compute capability 9.0: bytes of PTX, processor seconds to
PTX and from there to machine code, registers, bytes of local memory (arrays that are not in registers, what is spilled,
and what the function that records findings is given). With NVIDIA's ``nvdisasm`` (NVDISASM, or on the path) also
branches and instructions of machine code, loads and stores of local memory where nothing was found, and instructions,
loads and additions of the hot loop: on the way through it that adds the most, else loads the most, and then is the
shortest. KERNEL: names of kernels; without any, one of each family. ``--sass`` keeps the text.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from instrumentation.kernel.cuda_image import build_image
from refengine.kernels import all_kernels

if TYPE_CHECKING:
    from collections.abc import Iterable

    from instrumentation.kernel import Kernel

CAPABILITY = (9, 0)
HEAD = (
    "kernel", "form", "PTX kB", "to PTX s", "to code s", "registers", "local B", "branches", "code", "local",
    "hot loop", "loads", "adds",
)  # fmt: skip
FAMILIES = (
    "mul_mat_q4_k_x1_wide4", "mul_mat_q8_0_x8_wide2", "mul_mat_f16_x1_wide4",
    "mul_mat_4_q5_k_q6_k_iq4_nl_iq4_xs_x1_wide2", "mul_mat_swiglu_q5_k_q6_k_x1_wide2",
    "experts_swiglu_q3_k_q4_k_x1_wide2", "attention_f16_f16_64_w8", "attention_f16_f16_256_w8", "attention_merge_64_w2",
    "gated_delta_128_w4", "rms_norm_w8", "rope_store_neox_f16_f16_norms",
    "output_gate", "delta_gates", "best_of_chunks_16", "short_conv_gates_4", "swiglu", "get_rows_q4_k",
)  # fmt: skip
#: of a cubin's ``.nv.info``: registers of each function, bytes of its frame
_REGISTERS, _FRAME = 0x2F, 0x11
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P[T\d]+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_LABEL = re.compile(r"^\s*(\.L_x_\d+):", re.MULTILINE)
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")


#: arithmetic of floats
FLOATS = ("FFMA", "FADD", "FMUL")


@dataclass(frozen=True)
class Row:
    """One form of one kernel; the last six are None without a disassembler."""

    kernel: str
    form: str
    ptx_bytes: int
    ptx_s: float
    code_s: float
    registers: int
    local_bytes: int
    branches: int | None = None
    instructions: int | None = None
    spilled: int | None = None
    hot: int | None = None
    hot_loads: int | None = None
    hot_floats: int | None = None


def resources(cubin: bytes) -> tuple[int, int]:
    """Most registers of a function in a cubin, and bytes of all frames together."""
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    entry, count = struct.unpack_from("<HH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, start + i * entry) for i in range(count)]
    (names,) = struct.unpack_from("<H", cubin, 0x3E)
    registers, frames = 0, 0
    for name, _, _, _, offset, size, *_ in sections:
        at = sections[names][4] + name
        if cubin[at : cubin.index(b"\0", at)] != b".nv.info":
            continue
        place = offset
        while place < offset + size:
            form, attribute, length = struct.unpack_from("<BBH", cubin, place)
            place += 4
            if form != 4:
                continue
            if attribute in (_REGISTERS, _FRAME):
                _, value = struct.unpack_from("<II", cubin, place)
                registers = max(registers, value) if attribute == _REGISTERS else registers
                frames += value if attribute == _FRAME else 0
            place += length
    return registers, frames


def disassembler() -> str | None:
    """NVIDIA's disassembler, where there is one."""
    return os.environ.get("NVDISASM") or shutil.which("nvdisasm")


@dataclass
class _Block:
    operations: list[str]
    after: list[str]
    #: a way that is not taken unless something is found
    cold: bool = False


def _blocks(text: str) -> dict[str, _Block]:
    """Basic blocks by name, in order; ``entry`` is the first."""
    found: dict[str, _Block] = {}
    name, block = "entry", _Block([], [])
    number = 0

    def close(onward: str | None) -> None:
        nonlocal block
        if onward is not None:
            block.after.append(onward)
        found[name] = block
        block = _Block([], [])

    for line in text.splitlines():
        label = _LABEL.match(line)
        if label:
            close(label[1])
            name = label[1]
            continue
        match = _INSTRUCTION.search(line)
        if match is None:
            continue
        _, predicate, operation, rest = match.groups()
        block.operations.append(operation)
        block.cold |= operation.startswith(("ATOMG.E.CAS.64", "CALL"))
        target = _TARGET.search(rest)
        if operation.split(".")[0] in ("BRA", "EXIT", "RET", "BRX"):
            # Unconditional ones have no predicate, nor one among their operands.
            taken_if = predicate is not None or re.match(r"!?U?P\d", rest) is not None
            number += 1
            here = f"behind {number}"
            if target:
                block.after.append(target[1])
            close(here if taken_if else None)
            name = here
    close(None)
    return found


def _dominators(blocks: dict[str, _Block]) -> dict[str, set[str]]:
    before: dict[str, set[str]] = {name: set() for name in blocks}
    reached, todo = {"entry"}, ["entry"]
    while todo:
        name = todo.pop()
        for after in blocks[name].after:
            if after in blocks:
                before[after].add(name)
                if after not in reached:
                    reached.add(after)
                    todo.append(after)
    result = {name: set(reached) for name in reached}
    result["entry"] = {"entry"}
    changed = True
    while changed:
        changed = False
        for name in blocks:
            if name not in reached or name == "entry":
                continue
            new = set.intersection(*(result[b] for b in before[name] if b in reached)) | {name}
            if new != result[name]:
                result[name], changed = new, True
    return result


def hot_loop(text: str) -> list[str]:
    """Operations of the hot path through a function's disassembly."""
    blocks = {name: block for name, block in _blocks(text).items() if not block.cold}
    dominators = _dominators(blocks)
    before: dict[str, set[str]] = {name: set() for name in blocks}
    for name, block in blocks.items():
        for after in block.after:
            if after in blocks:
                before[after].add(name)
    loops: dict[str, set[str]] = {"entry": set(dominators)}
    for name in dominators:
        for head in blocks[name].after:
            if head in dominators[name]:
                inside, todo = {head, name}, [name]
                while todo:
                    each = todo.pop()
                    new = {b for b in before[each] if b in dominators} - inside if each != head else set()
                    inside |= new
                    todo += new
                loops[head] = loops.get(head, set()) | inside
    whole = [o for name in dominators for o in blocks[name].operations]
    kind = FLOATS if _count(whole, *FLOATS) else ("LD",)
    paths = [_path(blocks, head, body, kind) for head, body in loops.items()]
    most = max(_count(path, *kind) for path in paths)
    # Where there is a loop with nearly all of the work, it is that.
    return min((path for path in paths if _count(path, *kind) * 3 >= most), key=len)


def _path(blocks: dict[str, _Block], head: str, body: set[str], kind: tuple[str, ...]) -> list[str]:
    """Operations of the way through a loop's body that does the most of a kind, and else the least.

    A checked loop stands in it twice: once for where its indices were looked at before it, which is shorter.
    """
    order: list[str] = []
    seen, todo = {head}, [(head, iter(blocks[head].after))]
    while todo:
        name, rest = todo[-1]
        onward = next((each for each in rest if each in body and each not in seen), None)
        if onward is None:
            order.append(todo.pop()[0])
        else:
            seen.add(onward)
            todo.append((onward, iter(blocks[onward].after)))
    order.reverse()
    place = {name: i for i, name in enumerate(order)}
    best: dict[str, tuple[int, int, list[str]]] = {}
    ways: dict[str, tuple[int, int, list[str]]] = {head: (0, 0, [])}
    for name in order:
        work, length, operations = ways[name]
        own = blocks[name].operations
        best[name] = (work + _count(own, *kind), length - len(own), operations + own)
        for after in blocks[name].after:
            # Only forward: an inner loop counts once.
            if after in body and place[after] > place[name]:
                ways[after] = max(ways.get(after, best[name]), best[name], key=lambda way: way[:2])
    return max(best.values(), key=lambda way: way[:2])[2]


def _count(operations: Iterable[str], *starts: str) -> int:
    return sum(operation.startswith(starts) for operation in operations)


def disassembled(cubin: bytes) -> str | None:
    """Text of machine code; None without a disassembler."""
    tool = disassembler()
    if tool is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        ran = subprocess.run([tool, "-c", file.name], check=True, capture_output=True, text=True)
        return ran.stdout


def measure(kernel: Kernel, *, checked: bool, keep: Path | None = None) -> Row:
    """One row. Raises ``DeviceError`` where the toolkit is missing."""
    started = time.process_time()
    ptx = kernel.ptx(CAPABILITY, checked=checked)
    made = time.process_time()
    image = build_image(kernel.name, ptx, CAPABILITY)
    linked = time.process_time()
    form = "checked" if checked else "plain"
    if image.kind != "cubin":
        raise SystemExit("no linker: install the toolkit of the extra cu12 or cu13")
    registers, local = resources(image.data)
    row = Row(kernel.name, form, len(ptx), made - started, linked - made, registers, local)
    text = disassembled(image.data)
    if keep is not None:
        (keep / f"{kernel.name}.{form}.ptx").write_text(ptx)
        (keep / f"{kernel.name}.{form}.sass").write_text(text or "")
    if text is None:
        return row
    # The kernel itself: what it calls are functions of the compiler's, and the one that records findings.
    text = max(text.split(".section\t.text."), key=len)
    operations = [match[3] for match in _INSTRUCTION.finditer(text)]
    hot = hot_loop(text)
    return Row(
        *list(asdict(row).values())[:7],
        _count(operations, "BRA", "BRX"),
        len(operations),
        _count(
            [o for block in _blocks(text).values() if not block.cold for o in block.operations], "LDL", "STL"
        ),
        len(hot),
        _count(hot, "LD"),
        _count(hot, *FLOATS),
    )


def main(given: list[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernels", nargs="*", default=list(FAMILIES), metavar="KERNEL")
    parser.add_argument("--sass", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("--form", choices=("plain", "checked"))
    options = parser.parse_args(given)
    known = {kernel.name: kernel for kernel in all_kernels()}
    unknown = [name for name in options.kernels if name not in known]
    if unknown:
        parser.error(f"no kernel {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    if options.sass:
        options.sass.mkdir(parents=True, exist_ok=True)
    rows = []
    print(f"| {' | '.join(HEAD)} |\n{'|---' * len(HEAD)}|")
    for name in options.kernels:
        for checked in (False, True):
            if options.form == ("plain" if checked else "checked"):
                continue
            row = measure(known[name], checked=checked, keep=options.sass)
            rows.append(asdict(row))
            cells = [row.kernel, row.form, f"{row.ptx_bytes / 1000:.0f}", f"{row.ptx_s:.1f}", f"{row.code_s:.1f}",
                     row.registers, row.local_bytes, row.branches, row.instructions, row.spilled, row.hot,
                     row.hot_loads, row.hot_floats]  # fmt: skip
            print(f"| {' | '.join('-' if cell is None else str(cell) for cell in cells)} |", flush=True)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
