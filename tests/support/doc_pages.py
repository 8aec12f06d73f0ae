"""Pages that a reader follows: files that they say to save, commands that they say to type, and what is shown below.

A file is a block of code behind a line that ends with its name in backquotes and a colon. A command stands behind
``$`` in a ``console`` block; ``...`` in what it prints stands for anything. A command ends with 0, or with 1 where
"differ" is shown, or with what ``echo $?`` behind it shows.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"`([\w./-]+)`[^`\n]*:\n\n\Z")


@dataclass(frozen=True)
class File:
    """To be saved."""

    name: str
    text: str


@dataclass(frozen=True)
class Command:
    """To be typed."""

    text: str
    shown: str


def steps(page: Path) -> Iterator[File | Command]:
    """What a reader does, in order."""
    text = page.read_text(encoding="utf-8")
    for block in _BLOCK.finditer(text):
        language, content = block.groups()
        named = _NAME.search(text[: block.start()])
        if language == "console":
            for step in re.split(r"^\$ ", content, flags=re.MULTILINE)[1:]:
                command, _, shown = step.partition("\n")
                yield Command(command, shown)
        elif named:
            yield File(named[1], content)


def as_pattern(shown: str) -> str:
    """``...`` stands for anything."""
    return ".*".join(re.escape(part) for part in shown.split("..."))


class Reader:
    """Somebody who follows a page in a folder; ``programs`` gets what runs this Python and the source at ``root``."""

    def __init__(self, folder: Path, root: Path, programs: Path) -> None:
        self.folder = folder
        programs.mkdir()
        for name, arguments in (("python", ""), ("refengine", "-m refengine ")):
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}"$@"\n')
            program.chmod(0o755)
        self._environment = {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(root),
            "NO_COLOR": "1",
            "PYTHONUNBUFFERED": "1",
            # `git apply` leaves files out that are not in the checkout around them.
            "GIT_CEILING_DIRECTORIES": str(folder.parent),
            "TERM": "dumb",
        }
        self._code = 0

    def run(self, command: str) -> tuple[int, str]:
        """Exit code of a line, and what it printed."""
        done = subprocess.run(
            ["bash", "-c", f"(exit {self._code})\n{command}"],
            cwd=self.folder, env=self._environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        self._code = done.returncode
        return done.returncode, done.stdout

    def follow(self, page: Path) -> int:
        """Do all of it; how many commands there were. Fails where something else is printed than is shown."""
        todo = list(steps(page))
        commands = 0
        for step, following in zip(todo, [*todo[1:], None], strict=True):
            if isinstance(step, File):
                file = self.folder / step.name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(step.text, encoding="utf-8")
                continue
            commands += 1
            code, printed = self.run(step.text)
            wanted = int("differ" in step.shown)
            if isinstance(following, Command) and following.text == "echo $?":
                wanted = int(following.shown)
            assert code == wanted, f"{step.text}\n{printed}"
            if step.shown:
                assert re.fullmatch(as_pattern(step.shown), printed, re.DOTALL), f"{step.text}\n{printed}"
        return commands
