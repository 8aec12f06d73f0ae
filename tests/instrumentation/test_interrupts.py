"""An interrupt at any moment leaves books whole and locks open."""

from __future__ import annotations

import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from patience import PATIENCE

import refengine
from instrumentation import interrupts

MODEL = Path(__file__).resolve().parents[1] / "data" / "llama.gguf"


@pytest.fixture(autouse=True)
def usual_handler():
    """What a terminal has; a job in the background starts with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_now():
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_waits_for_the_outermost_block():
    reached = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - where it is raised is the point
        with interrupts.deferred():
            with interrupts.deferred():
                interrupt_now()
                reached.append("inner")
            reached.append("outer")
            assert interrupts.pending()
        reached.append("never")
    assert reached == ["inner", "outer"]
    assert not interrupts.pending()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_an_interrupt_nothing_changes():
    with interrupts.deferred():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        interrupt_now()


def test_the_handler_that_was_there_is_called():
    calls = []
    before = signal.signal(signal.SIGINT, lambda *given: calls.append(given))
    try:
        with interrupts.deferred():
            interrupt_now()
            assert calls == []
        assert len(calls) == 1
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_are_left_alone():
    seen = []

    def work():
        with interrupts.deferred():
            seen.append(interrupts._depth)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [0]


def test_an_engine_survives_two_hundred_interrupts():
    rng = random.Random(5)
    tokens = [int(t) for t in np.random.default_rng(1).integers(0, 250, 40)]
    with refengine.load(MODEL, n_ctx=128, n_ubatch=16, check="guard", threads=1) as engine:
        wanted = engine.logits(tokens)
        came = 0
        for _ in range(200):
            timer = threading.Timer(rng.uniform(0, 0.004), interrupt_main)
            try:
                timer.start()  # which waits for the thread, and may be interrupted itself
                for _ in range(20):
                    engine.generate(tokens, n_predict=3, temperature=0, ignore_eos=True)
                time.sleep(PATIENCE)
            except KeyboardInterrupt:
                came += 1
            timer.join()
        assert came == 200
        assert engine.check_integrity() == []
        np.testing.assert_array_equal(engine.logits(tokens), wanted)
        assert engine.context.cache.free_positions == 128
        assert engine.findings == []
    assert engine.findings == []


def interrupt_main():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


if not hasattr(signal, "pthread_kill"):  # Windows
    del test_an_engine_survives_two_hundred_interrupts
