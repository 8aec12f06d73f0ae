"""Race programs (``racing.py``) told to PyTorch's CUDA stream sanitizer, as its own hooks would tell them.

It hears of kernels with the addresses of their whole tensors, of events, waits, allocations and frees. A part of a
buffer is a tensor at its first byte. A captured launch is heard when it is captured, a replay is not; neither are
host arrays.
"""

from __future__ import annotations

from typing import Any

from racing import Step, parse, parse_range
from torch.cuda import _sanitizer

SPACING = 1 << 20


def finds(program: str) -> bool:
    """Whether any step of a program is an error."""
    handler = _sanitizer.EventHandler()
    numbers: dict[str, int] = {}
    events: set[str] = set()
    return any(_error(handler, numbers, events, step) for step in parse(program))


def _error(handler: Any, numbers: dict[str, int], events: set[str], step: Step) -> bool:
    who, verb, words = step

    def number(name: str) -> int:
        return numbers.setdefault(name, len(numbers) + 1)

    def pointer(text: str) -> int:
        name, start, _ = parse_range(text)
        return number(name) * SPACING + start

    def launch(kind: str, names: tuple[str, ...]) -> bool:
        reads = {"read": names, "get": names[:1], "copy": names[:1], "scale": names[:1], "bump": names}
        writes = {"fill": names, "put": names[1:], "copy": names[1:], "scale": names[1:], "bump": names}
        read = {pointer(name) for name in reads.get(kind, ())}
        written = {pointer(name) for name in writes.get(kind, ())}
        aliases: dict[int, list[str]] = {each: [] for each in read | written}
        stream = number(who)
        return bool(handler._handle_kernel_launch(stream, read - written, written, set(), kind, aliases))

    if verb == "capture":
        launches = [text.split() for text in " ".join(words[1:]).split(",")]
        return any(launch(kind, tuple(names)) for kind, *names in launches)
    if who == "host":
        _host(handler, events, verb, words, number, pointer)
    elif verb == "destroy":
        if who in events:
            events.discard(who)
            handler._handle_event_deletion(number(who))
    elif verb == "record":
        events.add(words[0])
        handler._handle_event_record(number(words[0]), number(who))
    elif verb == "wait":
        if words[0] in events:
            handler._handle_event_wait(number(words[0]), number(who))
    elif verb != "replay":
        return launch(verb, words)
    return False


def _host(
    handler: Any, events: set[str], verb: str, words: tuple[str, ...], number: Any, pointer: Any
) -> None:
    name = words[0]
    if verb == "waits" and name in events:
        handler._handle_event_synchronization(number(name))
    elif verb == "syncs" and name == "all":
        handler._handle_device_synchronization()
    elif verb == "syncs":
        handler._handle_stream_synchronization(number(name))
    elif verb == "new":
        handler._handle_memory_allocation(pointer(name))
    elif verb == "frees" and name not in "hijk":
        handler._handle_memory_deallocation(pointer(name))
