"""Incident I2: a model loads and answers short prompts; a long prompt needs a buffer that grows with the cache.

Elsewhere a discarded ``false`` made that a segmentation fault. Here the failure is one log line and one request's
error, and the next request has the bits of an engine that never failed.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from structlog.testing import capture_logs

import refengine
from cli.main import main
from instrumentation.errors import OutOfMemoryError
from refengine.batch import Batch
from refengine.context import DecodeStatus
from refengine.errors import ComputeError

MODEL = Path(__file__).resolve().parents[1] / "data" / "llama.gguf"
SIZES = {
    "n_ctx": 1024,
    "n_batch": 512,
    "n_ubatch": 64,
    "cache_type_k": "f32",
    "cache_type_v": "f32",
    "threads": 1,
}
SHORT = list(range(5, 25))
LONG = [int(t) for t in np.random.default_rng(2).integers(0, 250, 500)]


def load(**options):
    return refengine.load(MODEL, worst_case_reserve=False, **{**SIZES, **options})


def reserved_by(tokens, check):
    with load(check=check) as engine:
        engine.logits(tokens)
        snapshot = engine.allocator.snapshot()
        return snapshot.reserved_peak


@pytest.fixture(scope="module", params=["off", "guard"])
def starved(request):
    """A limit under which the first 256 positions fit and the next do not, and the level it holds for."""
    limit = reserved_by(LONG, request.param) - 1
    assert reserved_by(LONG[:256], request.param) <= limit
    return {"check": request.param, "device_memory_limit": limit}


def test_a_long_prompt_gets_compute_error_and_the_next_short_one_its_bits(starved):
    with load(check=starved["check"]) as engine:
        wanted = engine.logits(SHORT)
    with load(**starved) as engine:
        np.testing.assert_array_equal(engine.logits(SHORT), wanted)
        before = engine.allocator.snapshot()
        with capture_logs() as logs, pytest.raises(ComputeError, match=r"Compute error\. .*-2") as caught:
            engine.logits(LONG)
        assert caught.value.exit_code == 3
        assert "compute" in str(caught.value)
        [line] = [entry for entry in logs if entry["event"] == "failed to reserve graph"]
        assert line["owner"] == "target"
        assert line["requested"] > line["free"] >= 0
        assert 1 <= len(line["holders"]) <= 5
        assert engine.context.cache.free_positions == 1024
        assert engine.allocator.snapshot().reserved >= before.reserved
        np.testing.assert_array_equal(engine.logits(SHORT), wanted)
        made = engine.generate(SHORT, n_predict=8, temperature=0, return_logits=True)
        assert len(made.tokens) <= 8
        assert engine.findings == []


def test_it_fails_in_a_late_micro_batch_and_leaves_the_cache_as_it_was(starved):
    with load(**starved) as engine:
        context = engine.context
        assert context.decode(Batch.of(SHORT, 0, 0, "last")) == DecodeStatus.OK
        ran = []
        run = context.executor.run
        context.executor.run = lambda *given: ran.append(given) or run(*given)
        status = context.decode(Batch.of(LONG, len(SHORT), 0, "last"))
        assert status == DecodeStatus.ALLOC_FAILED
        assert len(ran) >= 2, "failed before its third micro-batch"
        assert context.cache.length(0) == len(SHORT)
        context.cache.check_integrity()
        follow = Batch.of([7], len(SHORT), 0, "last")
        assert context.decode(follow) == DecodeStatus.OK
        seen = context.logits.copy()
        context.cache.remove(0)
    with load(check=starved["check"]) as engine:
        np.testing.assert_array_equal(engine.logits([*SHORT, 7])[-1], seen[0])


def test_the_failed_reservation_changes_nothing(starved):
    with load(**starved) as engine:
        engine.logits(LONG[:256])
        before = engine.allocator.snapshot(), engine.allocator.table()
        shapes = list(engine.context.executor._executables)
        with pytest.raises(ComputeError):
            engine.logits(LONG)
        after = engine.allocator.snapshot(), engine.allocator.table()
        assert after[1] == before[1]
        assert after[0].reserved == before[0].reserved
        assert list(engine.context.executor._executables) == shapes


def test_a_worst_case_reservation_cannot_run_out_later(starved):
    """The smallest limit that it loads with is one under which every prompt that fits the context works."""
    with pytest.raises(OutOfMemoryError) as refused:
        refengine.load(MODEL, **{**SIZES, **starved, "device_memory_limit": 4096})
    limit = int(re.search(r"smallest limit that works is (\d+)", str(refused.value))[1])
    with refengine.load(MODEL, **{**SIZES, **starved, "device_memory_limit": limit}) as engine:
        engine.logits(LONG)
        engine.logits(SHORT)
        assert engine.allocator.snapshot().reserved_peak == limit


def test_the_command_line_ends_with_exit_code_3(starved, tmp_path):
    prompt = tmp_path / "long.txt"
    prompt.write_text("the quick brown fox " * 60)
    arguments = [
        "generate",
        "-m",
        str(MODEL),
        "-f",
        str(prompt),
        "-n",
        "4",
        "-c",
        "2048",
        "-b",
        "512",
        "-ub",
        "64",
    ]
    arguments += [
        "-ctk",
        "f32",
        "-ctv",
        "f32",
        "-t",
        "1",
        "--check",
        starved["check"],
        "--no-worst-case-reserve",
    ]
    with refengine.load(
        MODEL, **{**SIZES, "n_ctx": 2048}, check=starved["check"], worst_case_reserve=False
    ) as engine:
        tokens = engine.tokenizer.encode(prompt.read_text())
        assert len(tokens) > 600
        engine.logits(tokens[:256])
        limit = engine.allocator.snapshot().reserved_peak
    result = CliRunner().invoke(main, [*arguments, "--device-memory-limit", str(limit)])
    assert result.exit_code == 3, result.stderr
    assert "Compute error." in result.stderr
    assert "Traceback" not in result.stderr
