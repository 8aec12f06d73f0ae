"""Random kernels against an interpreter of threads: does the uniformity analysis hold, and the cutting?"""

import importlib.util
import os

import numpy as np
import pytest
from kernel_fuzz import BLOCK, LENGTH, Program, interpret
from kernel_runner import OPTION_SETS, run

from instrumentation.errors import KernelDialectError
from instrumentation.kernel import HostOptions

DEEP = int(os.environ.get("REFENGINE_FUZZ_KERNELS", "0"))
FIRST = int(os.environ.get("REFENGINE_FUZZ_FIRST", "0"))
CHECKED = HostOptions(checked=True)
SEEDS = range(FIRST, FIRST + (DEEP or 20))


def load(path, source):
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.fuzzed


@pytest.mark.parametrize("seed", SEEDS)
def test_random_kernel(seed, tmp_path):
    program = Program(seed)
    kernel = load(tmp_path / f"fuzz_{seed}.py", program.kernel_source)
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 1009, 2 * BLOCK).astype(np.int64)[: max(LENGTH, 2 * BLOCK)]
    for n in (0, 3):
        y = rng.integers(0, 1009, 2 * BLOCK).astype(np.int64)
        want = interpret(program.thread_source, 2, x, y, n)
        # The checked form takes longest to compile.
        for options in (OPTION_SETS[0], OPTION_SETS[-1], *([CHECKED] if DEEP or seed % 5 == 0 else [])):
            got = y.copy()
            run(kernel, 2, x, got, n, options=options)
            np.testing.assert_array_equal(got, want, err_msg=f"{options}\n{program.kernel_source}")


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 30))
def test_a_collective_that_some_threads_miss_is_refused(seed, tmp_path):
    source = Program(seed).with_misplaced_collective()
    with pytest.raises(
        KernelDialectError, match=r"fuzz_\d+.py:\d+: fuzzed: .*(differs between threads|condition)"
    ):
        load(tmp_path / f"fuzz_{seed}.py", source)
