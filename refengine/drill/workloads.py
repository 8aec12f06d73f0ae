"""What is asked of an engine under the drill: small, and the same tokens each time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from refengine.executor import MAX_EXECUTABLES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from refengine.drill.fault import Workload
    from refengine.engine import Engine

#: tokens of the first prompt, and of the one behind the plant: another batch shape, with rows enough for a library
WARM, STEP = 11, 17
N_PREDICT = 4
#: two pages for four requests that need one or two each
N_CELLS, N_CLIENTS = 64, 4

Texts = list[list[int]]


def prompt(engine: Engine, length: int) -> list[int]:
    """Token ids that any vocabulary has."""
    return [(5 + 7 * i) % engine.config.n_vocab for i in range(length)]


def ask(engine: Engine, length: int, n_predict: int = N_PREDICT) -> list[int]:
    """Greedy tokens behind a prompt, which begins from nothing."""
    made = engine.generate(prompt(engine, length), n_predict=n_predict, temperature=0, ignore_eos=True)
    engine.drop_prefixes()
    return made.tokens


def warm_up(engine: Engine) -> Texts:
    """Compile, capture and draft for the first time; the second one replays."""
    return [ask(engine, WARM), ask(engine, WARM)]


def _text(engine: Engine) -> Texts:
    return [ask(engine, STEP), ask(engine, STEP)]


def _saturated(engine: Engine) -> Texts:
    """Incident I1: more is asked at a time than there are cells."""
    requests = [
        engine.submit(
            prompt(engine, WARM + i), n_predict=N_CELLS // 2, temperature=0, ignore_eos=True, background=False
        )
        for i in range(N_CLIENTS)
    ]
    return [request.result().tokens for request in requests]


def _shapes(engine: Engine) -> Texts:
    """More batch shapes than are kept."""
    return [ask(engine, 1 + i, 1) for i in range(MAX_EXECUTABLES + 1)]


WORKLOADS: Mapping[Workload, Callable[[Engine], Texts]] = {
    "text": _text,
    "saturated": _saturated,
    "shapes": _shapes,
}
