"""Chat templates: the Jinja program in ``tokenizer.chat_template`` turns messages into a prompt.

A template comes with a model file from anywhere, so it is run as hostile code: ``template_sandbox`` says what
it may use, ``template_budget`` what it may cost. It can neither hang nor fill the memory.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Final

import jinja2
from jinja2.exceptions import SecurityError

from refengine.errors import ModelFileError, RequestError
from refengine.template_budget import BudgetError, measure, spending
from refengine.template_sandbox import RefusedByTemplateError, compile_template, one_line

# Templates in the wild are below 40,000 characters.
MAX_TEMPLATE_CHARS: Final = 256 * 1024


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, object]],
    *,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    **kwargs: object,
) -> str:
    """Return the prompt that ``template`` makes of ``messages`` (each with ``role`` and ``content``).

    Further keyword arguments (``tools``, ``enable_thinking``...) are variables of the template. Encode the
    result with ``parse_special=True, add_special=False``: the template writes the control tokens itself.

    Raises ``ModelFileError`` for a template that is broken, reaches outside the sandbox or costs too much,
    and ``RequestError`` for messages that it refuses or cannot render.
    """
    if isinstance(messages, (str, bytes)) or not all(isinstance(message, Mapping) for message in messages):
        raise RequestError("messages is not a list of objects; wanted [{'role': ..., 'content': ...}]")
    variables: dict[str, object] = {
        **kwargs,
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos_token,
        "eos_token": eos_token,
    }
    compiled = _compile(template)
    units = measure(variables)
    try:
        with spending(units):
            return compiled.render(variables)
    except RefusedByTemplateError as error:
        raise RequestError(f"the chat template refused the messages: {one_line(error)}") from None
    except (BudgetError, SecurityError, OverflowError, RecursionError, MemoryError) as error:
        raise ModelFileError(
            f"tokenizer.chat_template was stopped: {one_line(error)}; give another template"
        ) from None
    except Exception as error:  # noqa: BLE001 - whatever a template can raise is about its messages
        raise RequestError(
            f"tokenizer.chat_template cannot render these messages: {type(error).__name__}: "
            f"{one_line(error)}; check that each message has the fields that the template reads"
        ) from None


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    if len(template) > MAX_TEMPLATE_CHARS:
        raise ModelFileError(
            f"tokenizer.chat_template has {len(template)} characters; wanted at most {MAX_TEMPLATE_CHARS}"
        )
    try:
        return compile_template(template)
    except jinja2.TemplateSyntaxError as error:
        raise ModelFileError(
            f"tokenizer.chat_template, line {error.lineno}: {one_line(error.message)}"
        ) from None
    except Exception as error:  # noqa: BLE001 - nesting too deep for the parser or for Python's compiler
        raise ModelFileError(
            f"tokenizer.chat_template cannot be compiled: {type(error).__name__}: {one_line(error)}"
        ) from None
