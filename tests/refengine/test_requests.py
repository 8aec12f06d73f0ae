"""Requests from several threads, in any state: who waits is told, who leaves is forgotten, nobody else notices."""

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest

import numpy as np
import pytest
from engines import same_bits
from patience import PATIENCE
from slots import TEXTS, Watch, Wish, alone, expect, loaded, plain, queued

import refengine
from instrumentation.errors import DeviceError
from refengine.batch import Batch
from refengine.errors import ComputeError, ContextSizeError, RequestError
from refengine.generation import Generation

CLOSED = "the engine is closed; load the model again"
#: no test waits as long


@pytest.fixture(params=["none", "draft-mtp"])
def engine(request: pytest.FixtureRequest) -> Iterator[refengine.Engine]:
    with loaded(n_slots=2, n_ctx=192, spec_type=request.param, check="guard") as made:
        yield made
        assert made.scheduler.is_idle
        assert made.check_integrity() == []
        assert made.findings == []
        made.drop_prefixes()
        cache = made.context.cache
        assert cache.free_pages == cache.shape.n_pages
    assert [thread for thread in threading.enumerate() if thread.name == "refengine"] == []


@contextmanager
def held_up(engine: refengine.Engine) -> Iterator[None]:
    """No step is made by other threads."""
    with engine._service.lock:
        yield


def in_threads(*calls: Callable[[], object]) -> list[object]:
    """What each call gives, or raises, in its own thread."""
    results: list[object] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except Exception as error:  # noqa: BLE001 - looked at by the test
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a thread hangs"
    return results


def same(found: object, wish: Wish) -> bool:
    assert isinstance(found, Generation), found
    wanted = alone("qwen35", wish)
    assert found.logits is not None
    assert wanted.logits is not None
    return (
        found.tokens == wanted.tokens and found.text == wanted.text and same_bits(found.logits, wanted.logits)
    )


# --- from several threads


def test_what_is_submitted_goes_on_while_nobody_waits(engine: refengine.Engine):
    wish = Wish.of(0, 20, 10)
    request = engine.submit(list(wish.prompt), **wish.arguments)
    deadline = time.monotonic() + PATIENCE
    while not request.ended and time.monotonic() < deadline:
        time.sleep(0.01)
    assert request.status == "done"
    assert same(request.result(), wish)
    assert same(request.result(timeout=0), wish), "as often as one likes"
    assert engine.scheduler.statistics.steps <= 10


def test_requests_of_many_threads(engine: refengine.Engine):
    """Those that submit, those that wait on their own, and streams, all at once."""
    wishes = [Wish.of(i % 3, 5 + 9 * i, 8 + i, temperature=0.8 * (i % 2), seed=i) for i in range(9)]
    for wish in wishes:
        alone("qwen35", wish)

    def call(i: int) -> Callable[[], object]:
        prompt, arguments = list(wishes[i].prompt), wishes[i].arguments
        if i % 3 == 0:
            return lambda: engine.submit(prompt, **arguments).result()
        if i % 3 == 1:
            return lambda: engine.generate(prompt, **arguments)
        arguments.pop("return_logits")
        return lambda: "".join(engine.stream(prompt, **arguments))

    results = in_threads(*(call(i) for i in range(len(wishes))))
    for i, (found, wish) in enumerate(zip(results, wishes, strict=True)):
        assert found == alone("qwen35", wish).text if i % 3 == 2 else same(found, wish)


def test_several_wait_for_one_request(engine: refengine.Engine):
    wish = Wish.of(0, 20, 12)
    request = engine.submit(list(wish.prompt), **wish.arguments)
    assert all(same(found, wish) for found in in_threads(*[request.result] * 4))


def test_logits_beside_what_other_threads_ask(engine: refengine.Engine):
    wishes = [Wish.of(0, 30, 20), Wish.of(1, 20, 20)]
    wanted = plain("qwen35").logits(TEXTS[2][:60])
    results = in_threads(
        *(lambda wish=wish: engine.generate(list(wish.prompt), **wish.arguments) for wish in wishes),
        *[lambda: engine.logits(TEXTS[2][:60])] * 3,
    )
    assert all(same(found, wish) for found, wish in zip(results, wishes, strict=False))
    assert all(same_bits(np.asarray(found), wanted) for found in results[2:])


def test_many_streams_in_one_thread(engine: refengine.Engine):
    """More than there are slots, taken piece by piece in turn."""
    wishes = [Wish.of(i % 3, 4 + i, 6 + i) for i in range(5)]
    arguments = [{k: v for k, v in wish.arguments.items() if k != "return_logits"} for wish in wishes]
    ends: list[Generation] = []
    streams = [
        engine.stream(list(wish.prompt), on_end=ends.append, **rest)
        for wish, rest in zip(wishes, arguments, strict=True)
    ]
    texts = ["".join(filter(None, pieces)) for pieces in zip(*zip_longest(*streams), strict=True)]
    assert texts == [alone("qwen35", wish).text for wish in wishes]
    assert sorted(map(len, (end.tokens for end in ends))) == [6, 7, 8, 9, 10]


def test_a_last_piece_that_comes_with_the_end_is_not_lost(
    engine: refengine.Engine, monkeypatch: pytest.MonkeyPatch
):
    """Another thread makes the last step between a look for pieces and a look for the end."""
    wish = Wish.of(0, 20, 6)
    request = queued(engine, wish)
    looked = type(request).ended
    assert isinstance(looked, property)

    def ended(self) -> bool:
        monkeypatch.undo()
        while not looked.__get__(self):
            engine.drive()
        return True

    monkeypatch.setattr(type(request), "ended", property(ended))
    assert "".join(request.pieces()) == alone("qwen35", wish).text


def test_what_an_ended_request_says_of_its_drafts_is_whole(monkeypatch: pytest.MonkeyPatch):
    """A thread that waits may look as soon as the status says that it has ended."""
    wish = Wish.of(0, 20, 9)
    with loaded(spec_type="draft-mtp") as engine:
        request = queued(engine, wish)
        seen = []
        take = request.take

        def taking(row):
            token = take(row)
            if request.ended:
                seen.append(request.generation())
            return token

        monkeypatch.setattr(request, "take", taking)
        while not request.ended:
            engine.drive()
        assert seen[0].draft == request.generation().draft
        assert seen[0].draft.generated > 0


# --- states


def test_a_request_says_where_it_is(engine: refengine.Engine):
    with held_up(engine):
        first, second, third = (queued(engine, Wish.of(text, 9, n)) for text, n in ((0, 3), (1, 30), (2, 3)))
        assert [r.status for r in (first, second, third)] == ["queued"] * 3
        assert not any(r.ended for r in (first, second, third))
        assert first.tokens == []
        engine.drive()
        assert [r.status for r in (first, second, third)] == ["running", "running", "queued"]
        assert len(first.tokens) == 1
        while not first.ended:
            engine.drive()
        assert first.status == "done"
        engine.drive()
        assert third.status == "running"
        engine.logits([1, 2, 3])
        assert [r.status for r in (second, third)] == ["queued", "queued"]
        assert third.preemptions == 1
    assert second.result().preemptions == second.preemptions == 1
    assert third.result().finish_reason == "length"
    assert [r.number for r in (first, second, third)] == sorted(r.number for r in (first, second, third))


@pytest.mark.parametrize("state", ["queued", "running", "done", "failed", "preempted"])
def test_a_request_is_cancelled_in_any_state(engine: refengine.Engine, state: str):
    others = [Wish.of(1, 20, 12), Wish.of(2, 20, 12)]
    watch = Watch(engine)
    wish = Wish.of(0, 60, 200 if state == "failed" else 20)
    if state == "queued":
        kept = [watch.ask(other) for other in others]
        request = watch.ask(wish)
        watch.step()
    else:
        request = watch.ask(wish)
        kept = [watch.ask(other) for other in others]
        for _ in range(3):
            watch.step()
        if state in ("done", "failed"):
            while not request.ended:
                watch.step()
        if state == "preempted":
            engine.logits([1])
    tokens = request.tokens
    assert request.status == ("queued" if state == "preempted" else state)
    request.cancel()
    request.cancel()
    assert request.status == (state if state in ("done", "failed") else "cancelled")
    assert request.tokens == tokens
    assert all(slot.request is not request for slot in engine.scheduler.slots)
    if state == "failed":
        with pytest.raises(ContextSizeError):
            request.result()
    else:
        found = request.result()
        assert found.finish_reason == ("length" if state == "done" else "cancelled")
        assert found.tokens == tokens
        assert found.logits is not None
        assert len(found.logits) == len(tokens)
        assert "".join(request.pieces()) == found.text
    while not engine.scheduler.is_idle:
        engine.drive()
    for other, one in zip(others, kept, strict=True):
        expect("qwen35", other, one, 192)


def test_who_waits_for_a_cancelled_request_is_told(engine: refengine.Engine):
    request = engine.submit(TEXTS[0][:9], n_predict=-1, temperature=0, ignore_eos=True)

    def cancel() -> None:
        while len(request.tokens) < 3:
            time.sleep(0.001)
        request.cancel()

    found, _ = in_threads(request.result, cancel)
    assert isinstance(found, Generation | ContextSizeError)
    if isinstance(found, Generation):
        assert found.finish_reason == "cancelled"
        assert len(found.tokens) >= 3


def test_a_result_that_does_not_come_in_time(engine: refengine.Engine):
    wish = Wish.of(0, 9, 20)
    with held_up(engine):
        request = engine.submit(list(wish.prompt), **wish.arguments)
        begun = time.monotonic()
        errors = in_threads(lambda: request.result(timeout=0), lambda: request.result(timeout=0.1))
        assert [str(error) for error in errors] == [
            f"request {request.number} has not ended after {seconds} seconds" for seconds in (0, 0.1)
        ]
        assert all(isinstance(error, TimeoutError) for error in errors)
        assert time.monotonic() - begun < PATIENCE
        assert not request.ended
    assert same(request.result(timeout=PATIENCE), wish)


def test_a_negative_or_missing_time_is_none_or_forever(engine: refengine.Engine):
    request = queued(engine, Wish.of(0, 9, 3))
    with pytest.raises(TimeoutError, match="has not ended after -1 seconds"):
        request.result(timeout=-1)
    assert same(request.result(timeout=None), Wish.of(0, 9, 3))


def test_a_stream_that_is_collected_while_books_change_ends_behind_it(
    engine: refengine.Engine, monkeypatch: pytest.MonkeyPatch
):
    """Such as in the middle of a preemption, behind which its request would be queued again."""
    streams = [engine.stream(TEXTS[0][:9], n_predict=30, ignore_eos=True)]
    next(streams[0])
    request = engine.scheduler.slots[0].request
    assert request is not None
    empty = engine.scheduler._empty

    def collecting(slot):
        streams.clear()
        gc.collect()
        empty(slot)

    monkeypatch.setattr(engine.scheduler, "_empty", collecting)
    engine.logits([1, 2])
    assert request.status == "cancelled"
    assert engine.scheduler.queue == []


# --- the end


def test_requests_in_flight_fail_when_the_engine_is_closed():
    engine = loaded(n_slots=2, n_ctx=4096, spec_type="draft-mtp", check="guard")
    requests = [engine.submit(TEXTS[i][:9], n_predict=-1, ignore_eos=True, temperature=0) for i in range(3)]
    stream = engine.stream(TEXTS[3][:9], ignore_eos=True)

    def close() -> None:
        while not requests[1].tokens:
            time.sleep(0.001)
        engine.close()

    *results, _ = in_threads(*(r.result for r in requests), lambda: list(stream), close)
    assert [str(error) for error in results] == [CLOSED] * 4
    assert all(isinstance(error, RequestError) for error in results)
    assert [r.status for r in requests] == ["failed"] * 3
    assert [thread for thread in threading.enumerate() if thread.name == "refengine"] == []
    assert engine.allocator.table() == ()
    for call in (lambda: engine.submit([1]), lambda: engine.generate([1]), engine.drive):
        with pytest.raises(RequestError, match=f"^{CLOSED}$"):
            call()
    requests[0].cancel()
    engine.drop_prefixes()
    assert engine.findings == []


def test_a_thread_ends_with_the_work_and_comes_again(engine: refengine.Engine):
    for text in (0, 1):
        wish = Wish.of(text, 9, 5)
        assert same(engine.submit(list(wish.prompt), **wish.arguments).result(), wish)
        deadline = time.monotonic() + PATIENCE
        while engine._service.pump is not None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert engine._service.pump is None


def test_an_error_in_the_thread_of_the_engine_is_told_to_who_waits(
    engine: refengine.Engine, monkeypatch: pytest.MonkeyPatch
):
    def broken(_batch):
        raise ValueError("out of on_finding")

    wishes = [Wish.of(0, 20, 12), Wish.of(1, 20, 12)]
    with held_up(engine):
        requests = [engine.submit(list(wish.prompt), **wish.arguments) for wish in wishes]
        engine.drive()
        monkeypatch.setattr(engine.context, "decode", broken)
        pump = engine._service.pump
    assert pump is not None
    pump.join(PATIENCE)
    monkeypatch.undo()
    for request in requests:
        with pytest.raises(ValueError, match="out of on_finding"):
            request.result()
    again = engine.submit(list(wishes[0].prompt), **wishes[0].arguments)
    assert same(again.result(), wishes[0])


def test_what_is_asked_in_the_middle_of_a_step_is_refused(
    engine: refengine.Engine, monkeypatch: pytest.MonkeyPatch
):
    """As ``on_finding`` may; to submit is fine."""
    wish, later = Wish.of(0, 9, 5), Wish.of(1, 9, 5)
    request, decode, refused, queue = queued(engine, wish), engine.context.decode, [], []

    def asking(batch):
        for call in (
            engine.close, engine.drive, lambda: engine.logits([1]), lambda: engine.generate([1]),
            engine.check_integrity, engine.drop_prefixes,
        ):  # fmt: skip
            with pytest.raises(
                RequestError, match="the engine is in the middle of a step; ask again"
            ) as caught:
                call()
            refused.append(caught)
        if not queue:
            queue.append(queued(engine, later))
        return decode(batch)

    monkeypatch.setattr(engine.context, "decode", asking)
    engine.drive()
    monkeypatch.undo()
    assert len(refused) == 6
    assert same(request.result(), wish)
    assert same(queue[0].result(), later)


@pytest.mark.parametrize("computation", ["logits", "draft_logits", "exclusive"])
def test_what_is_asked_in_the_middle_of_a_computation_beside_requests_is_refused(
    monkeypatch: pytest.MonkeyPatch, computation: str
):
    wish, tokens = Wish.of(0, 9, 5), [1, 2, 3]
    with loaded(n_slots=1, spec_type="draft-mtp", check="guard") as engine:
        wanted = engine.logits(tokens)
        later, decode, refused = queued(engine, wish), engine.context.decode, []

        def asking(batch):
            for call in (
                engine.close, engine.drive, lambda: engine.logits([1]), lambda: engine.generate([1]),
                engine.check_integrity, engine.drop_prefixes, later.result,
            ):  # fmt: skip
                with pytest.raises(RequestError, match="the engine is in the middle of a step") as caught:
                    call()
                refused.append(caught)
            return decode(batch)

        monkeypatch.setattr(engine.context, "decode", asking)
        if computation == "exclusive":
            with engine.exclusive() as context:
                context.decode(Batch.of(tokens, 0, 0, "all"))
                assert same_bits(context.logits, wanted)
        else:
            getattr(engine, computation)(tokens)
        monkeypatch.undo()
        assert len(refused) == 7
        assert same(later.result(), wish)
        assert same_bits(engine.logits(tokens), wanted)
        assert engine.check_integrity() == []


# --- interrupts


@pytest.mark.parametrize("spec_type", ["none", "draft-mtp"])
def test_ctrl_c_ends_the_request_of_who_waits_in_the_main_thread_alone(spec_type: str):
    """A real signal, while another thread waits for its own."""
    mine, other = Wish.of(0, 9, 3000), Wish.of(1, 9, 120)
    alone("qwen35", other)
    with loaded(n_slots=2, n_ctx=4096, spec_type=spec_type, check="guard") as engine:
        results: list[object] = []
        begun = threading.Event()

        def wait() -> None:
            request = queued(engine, other)
            begun.set()
            results.append(request.result())

        def interrupt() -> None:
            begun.wait(PATIENCE)
            while not any(
                slot.request is not None and slot.request.ask.n_predict == 3000 and slot.request.tokens
                for slot in engine.scheduler.slots
            ):
                time.sleep(0.001)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        threads = [
            threading.Thread(target=wait, daemon=True),
            threading.Thread(target=interrupt, daemon=True),
        ]
        for thread in threads:
            thread.start()
        with pytest.raises(KeyboardInterrupt):
            engine.generate(list(mine.prompt), **mine.arguments)
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert same(results[0], other)
        assert engine.scheduler.is_idle
        assert engine.check_integrity() == []
        assert same(engine.generate(list(other.prompt), **other.arguments), other)
        assert engine.findings == []


def test_an_interrupt_while_the_lock_is_taken_does_not_keep_it(monkeypatch: pytest.MonkeyPatch):
    """The signal comes when ``acquire`` has the lock and has not returned yet."""
    with loaded() as engine:
        request = queued(engine, Wish.of(0, 9, 3))
        lock = engine._service.lock

        class Slow:
            def acquire(self, timeout: float) -> bool:
                taken = lock.acquire(timeout=timeout)
                signal.raise_signal(signal.SIGINT)
                return taken

            def release(self) -> None:
                lock.release()

        monkeypatch.setattr(engine._service, "lock", Slow())
        with pytest.raises(KeyboardInterrupt):
            engine.drive()
        monkeypatch.undo()
        (free,) = in_threads(lambda: lock.acquire(timeout=1) and lock.release() is None)
        assert free is True
        assert same(request.result(), Wish.of(0, 9, 3))


@pytest.mark.parametrize("check", ["off", "guard"])
@pytest.mark.parametrize("spec_type", ["none", "draft-mtp"])
def test_check_levels_give_the_same_bits(check: str, spec_type: str):
    wishes = [Wish.of(text, 20 + text, 12, temperature=0.8, seed=7) for text in range(3)]
    with loaded(n_slots=3, check=check, spec_type=spec_type) as engine:
        requests = [engine.submit(list(wish.prompt), **wish.arguments) for wish in wishes]
        assert all(same(request.result(), wish) for request, wish in zip(requests, wishes, strict=True))


def test_a_failed_request_raises_the_same_as_often_as_it_is_asked(monkeypatch: pytest.MonkeyPatch):
    def gone(_graph):
        raise DeviceError("the device is gone")

    with loaded() as engine:
        request = queued(engine, Wish.of(0, 9, 3))
        monkeypatch.setattr(engine.context.stream, "replay", gone)
        for _ in range(2):
            with pytest.raises(ComputeError, match="the device is gone"):
                request.result()
        monkeypatch.undo()
        with pytest.raises(ComputeError, match="the device is gone"):
            list(request.pieces())
        assert same(queued(engine, Wish.of(0, 9, 3)).result(), Wish.of(0, 9, 3))


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), "1", 10**400])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(timeout):
    with loaded("llama") as engine:
        request = queued(engine, Wish.of(0, 8))
        with pytest.raises(RequestError, match=r"timeout is .*; give seconds, or None"):
            request.result(timeout)
        engine.drive(-1)
        assert request.result(60).tokens
