"""Names that some patterns choose, for checks that cost too much to make everywhere."""

from __future__ import annotations

from fnmatch import fnmatchcase

from instrumentation.errors import BadInputError


class Globs:
    """Patterns with ``*``, ``?`` and ``[abc]``, some with commas between: ``kv.*,compute.attn_norm*``.

    Remembers whether any name matched: patterns that nothing matches are a mistake to tell somebody of.
    """

    def __init__(self, text: str, option: str) -> None:
        self.text = text
        self.option = option
        self.patterns = tuple(part.strip() for part in text.split(","))
        if not all(self.patterns):
            raise BadInputError(
                f"{option} is {text!r}; give patterns of names with commas between, such as 'kv.*'"
            )
        #: whether every name matches
        self.all = "*" in self.patterns
        #: whether some name did
        self.hit = self.all
        self._known: dict[str, bool] = {}

    def matches(self, name: str) -> bool:
        """Whether a name matches a pattern; case counts."""
        if self.all:
            return True
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = any(fnmatchcase(name, pattern) for pattern in self.patterns)
            self.hit |= found
        return found

    def __str__(self) -> str:
        return f"{self.option} {self.text!r}"


#: everything
EVERY_BUFFER, EVERY_KERNEL = Globs("*", "trap_buffers"), Globs("*", "trap_kernels")
