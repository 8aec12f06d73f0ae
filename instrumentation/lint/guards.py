"""Handlers around a statement that would swallow a failed ``unwrap()``."""

from __future__ import annotations

import ast

from instrumentation.lint.annotations import last_name

_BROAD = {"", "Exception", "BaseException"}
_CATCHING = _BROAD | {"Error", "OutOfMemoryError", "ReservationError"}


class Guards:
    """Stack of the ``try`` and ``with`` statements whose body is being analysed."""

    def __init__(self) -> None:
        self.stack: list[ast.Try | ast.With | ast.AsyncWith | ast.TryStar] = []

    def swallows(self) -> str:
        """How a failure here would be swallowed; blank when it would not."""
        for guard in reversed(self.stack):
            if isinstance(guard, ast.With | ast.AsyncWith):
                if any(_suppresses(item.context_expr) for item in guard.items):
                    return f"`suppress` on line {guard.lineno}"
                continue
            for handler in guard.handlers:
                broad, catches = _caught(handler.type)
                if catches:
                    if _does_nothing(handler.body, broad=broad):
                        return f"the empty `except` on line {handler.lineno}"
                    return ""
            if any(isinstance(statement, ast.Return) for statement in guard.finalbody):
                return f"the `return` in `finally` on line {guard.finalbody[0].lineno}"
        return ""


def _caught(classes: ast.expr | None) -> tuple[bool, bool]:
    names = (
        {last_name(name) for name in classes.elts} if isinstance(classes, ast.Tuple) else {last_name(classes)}
    )
    if classes is not None:
        names.discard("")
    return bool(names & _BROAD), bool(names & _CATCHING)


def _does_nothing(body: list[ast.stmt], *, broad: bool) -> bool:
    """Whether a handler only goes on. Naming the failure and trying the next in a loop is doing something."""
    empty = (ast.Pass, ast.Continue, ast.Break) if broad else (ast.Pass,)
    return all(
        isinstance(statement, empty)
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        for statement in body
    )


def _suppresses(context: ast.expr) -> bool:
    return (
        isinstance(context, ast.Call)
        and last_name(context.func) == "suppress"
        and any(last_name(name) in _CATCHING - {""} for name in context.args)
    )
