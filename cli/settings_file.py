"""Options from elsewhere than the command line: environment variables, and a file of settings.

What a command line says goes before what the environment says (``REFENGINE_CTX_SIZE`` for ``--ctx-size``), and that
before the file. A file is TOML. Keys are long flags without their dashes: those at the top are for every command that
has the option, those in a table for one command::

    device = "cuda"
    [soak]
    parallel = 8
"""

from __future__ import annotations

import difflib
import os
import tomllib
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from instrumentation.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

#: bytes of the largest file that is read
LARGEST = 1 << 20
#: options that nothing but a command line gives, and those that a file cannot give
_HELP = ("--help", "--help-all")
_ONLY_HERE = (*_HELP, "--config")


class _Found(NamedTuple):
    """An option by one of its flags; ``off``: the flag is the one that turns it off."""

    option: click.Option
    off: bool


def use_environment(ctx: click.Context) -> None:
    """Let the options of the command that ``ctx`` is of have the values that environment variables give them.

    Each long flag has a variable. Raises ``BadInputError`` for a flag that is neither true nor false.
    """
    values, sources = {}, {}
    for key, found in _options(ctx.command, without=_HELP).items():
        variable = f"REFENGINE_{key.upper().replace('-', '_')}"
        text = os.environ.get(variable)
        if text:
            values[str(found.option.name)] = _of_text(variable, text, found)
            sources[str(found.option.name)] = variable
    ctx.default_map = values
    ctx.meta[__name__] = sources


def read_settings(ctx: click.Context, path: Path) -> dict[str, Any]:
    """Values by parameter of the command that ``ctx`` is of. Raises ``BadInputError`` for what is no setting.

    All of the file is looked at, so that a wrong key for another command does not wait for it.
    """
    content = _read(path)
    contexts: list[click.Context] = []
    at: click.Context | None = ctx
    while at is not None:
        contexts.insert(0, at)
        at = at.parent
    _require_known(path, content, contexts[0].command, ctx, ())
    options = _options(ctx.command)
    values: dict[str, Any] = {}
    scope: Any = content
    for place, each in enumerate(contexts):
        if place:
            scope = scope.get(each.info_name, {})
        for key, value in scope.items():
            if not isinstance(value, dict) and key in options:
                found = options[key]
                values[str(found.option.name)] = _value(path, key, value, found)
    return values


def say_source(error: click.BadParameter, ctx: click.Context) -> click.BadParameter:
    """An error about a value that stands on no command line says where it stands."""
    name = error.param.name if error.param is not None else None
    if name is None or ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT_MAP:
        return error
    message = f"{error.message} (from {ctx.meta[__name__][name]})"
    return click.BadParameter(message, ctx, error.param, error.param_hint)


def use_file(ctx: click.Context, _param: click.Parameter, path: Path | None) -> None:
    """Callback of ``--config``, before other options are looked at."""
    if path is not None:
        values = read_settings(ctx, path)
        ctx.meta[__name__] = {**dict.fromkeys(values, path), **ctx.meta[__name__]}
        ctx.default_map = {**values, **(ctx.default_map or {})}


def _read(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        raw = file.read(LARGEST + 1)
    if len(raw) > LARGEST:
        raise BadInputError(f"{path}: a file of settings has at most {LARGEST} bytes; this one has more")
    try:
        return tomllib.loads(raw.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInputError(f"{path}: is no TOML: {error or type(error).__name__}") from None


def _require_known(
    path: Path, content: Mapping[str, Any], command: click.Command, ctx: click.Context, where: tuple[str, ...]
) -> None:
    known = {key: found for leaf in _leaves(command, ctx) for key, found in _options(leaf).items()}
    commands = command.list_commands(ctx) if isinstance(command, click.Group) else []
    for key, value in content.items():
        named = f"{path}: {'.'.join((*where, key))}"
        if isinstance(value, dict):
            if key not in commands or not isinstance(command, click.Group):
                raise BadInputError(f"{named} is no command{_near(key, commands)}")
            child = command.get_command(ctx, key)
            assert child is not None
            _require_known(path, value, child, ctx, (*where, key))
        elif key not in known:
            raise BadInputError(
                f"{named} is no option{_near(key, known)}; keys are long flags without dashes"
            )
        else:
            _value(path, key, value, known[key])


def _near(key: str, names: Any) -> str:
    close = difflib.get_close_matches(key, list(names), 1)
    return f": {close[0]}?" if close else ""


def _leaves(command: click.Command, ctx: click.Context) -> Iterator[click.Command]:
    if not isinstance(command, click.Group):
        yield command
        return
    for name in command.list_commands(ctx):
        child = command.get_command(ctx, name)
        if child is not None:
            yield from _leaves(child, ctx)


def _options(command: click.Command, without: Sequence[str] = _ONLY_HERE) -> dict[str, _Found]:
    """Options by long flag; some are left out."""
    found = {}
    for option in command.params:
        if isinstance(option, click.Option):
            for off, flags in ((False, option.opts), (True, option.secondary_opts)):
                for flag in flags:
                    if flag.startswith("--") and flag not in without:
                        found[_key(flag)] = _Found(option, off)
    return found


def _key(flag: str) -> str:
    return flag.removeprefix("--")


def _value(path: Path, key: str, value: Any, found: _Found) -> Any:
    option = found.option
    # A flag that is refused on a command line is refused here, with its reason.
    refused = getattr(option, "refused", None)
    if refused is not None:
        raise BadInputError(f"{path}: {key}: {refused.reason}")
    if option.is_flag:
        if not isinstance(value, bool):
            raise BadInputError(f"{path}: {key} is {value!r}; want true or false")
        return _flag(value, found)
    many: list[Any] = value if isinstance(value, list) else [value]
    wrong = [each for each in many if isinstance(each, bool) or not isinstance(each, str | int | float)]
    if wrong or (isinstance(value, list) and not option.multiple):
        wanted = "texts or numbers in a list" if option.multiple else "a text or a number"
        raise BadInputError(f"{path}: {key} is {value!r}; want {wanted}")
    # No command line has one, and no path may.
    if any("\0" in each for each in many if isinstance(each, str)):
        raise BadInputError(f"{path}: {key} is {value!r}; want text without NUL")
    return [str(each) for each in many] if option.multiple else value


def _of_text(variable: str, text: str, found: _Found) -> Any:
    if found.option.is_flag:
        try:
            return _flag(click.BOOL.convert(text, None, None), found)
        except click.BadParameter:
            raise BadInputError(f"{variable} is {text!r}; want true or false") from None
    return text.split() if found.option.multiple else text


def _flag(value: bool, found: _Found) -> bool:
    # The flag itself may be the one that turns something off, with or without another beside it.
    turns_off = found.off or (not found.option.secondary_opts and found.option.flag_value is False)
    return value is not turns_off
