"""What shells offer behind an option. It refuses nothing: values are looked at where they mean something."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from collections.abc import Callable


class Offered(click.types.StringParamType):
    """Text, for which a shell offers words, or names of files (``also="file"``) or folders (``"dir"``).

    ``several``: words with commas between. Words may come from a function, which is called when a shell asks.
    """

    def __init__(
        self, *words: str, also: str = "", several: bool = False, ask: Callable[[], list[str]] = list
    ) -> None:
        self.words = words
        self.also = also
        self.several = several
        self.ask = ask

    def shell_complete(
        self, _ctx: click.Context, _param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Words that begin like ``incomplete``; else the shell is told to look for files itself."""
        before, comma, last = incomplete.rpartition(",") if self.several else ("", "", incomplete)
        offered = [*self.words, *self.ask()]
        items = [CompletionItem(f"{before}{comma}{word}") for word in offered if word.startswith(last)]
        # Where a shell is told of files it forgets the words.
        return [CompletionItem(incomplete, type=self.also)] if self.also and not (items and last) else items


def _codes() -> list[str]:
    from instrumentation.catalogue import CATALOGUE  # noqa: PLC0415 - only where a shell asks

    return list(CATALOGUE)


FILE = Offered(also="file")
#: a model's file, or its name
MODEL = Offered("default", "smollm2", also="file")
CODE = Offered(ask=_codes)
DEVICE = Offered("auto", "host", "cuda")
LEVEL = Offered("off", "guard", "audit", "trap")
LEVELS = Offered(*LEVEL.words, several=True)
CACHE_TYPE = Offered("f32", "f16", "bf16", "q8_0")
GEMM = Offered("kernels", "cublas")
SPEC_TYPE = Offered("none", "draft-mtp")
