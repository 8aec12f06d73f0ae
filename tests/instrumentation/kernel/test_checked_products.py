"""Checked products on a GPU's machine code: rows that are no whole steps, weights behind shifts, states beforehand."""

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from ptx_cuda import ptx_device
from trap_world import World

from instrumentation.kernel.checked.lower_cuda import checked_source
from refengine.kernels.mul_mat import mul_mat

N_OUT, ROWS = 5, 2
F16, Q3_K = (mul_mat(kind, 1, 4) for kind in (GGMLQuantizationType.F16, GGMLQuantizationType.Q3_K))


def operands(kernel, blocks):
    """Random ones of rows of so many blocks of 32 weights."""
    rng = np.random.default_rng(blocks)
    unused = {"codes": np.zeros((1, 1), np.uint8), "words": np.zeros((1, 1), np.uint32)}
    scales = rng.standard_normal((N_OUT, blocks * 32)).astype(np.float16)
    if kernel is F16:
        weights = {"halves": scales.view(np.uint64)}
    else:
        weights = {
            "codes": rng.integers(0, 256, (N_OUT, blocks // 8 * 96), np.uint8),
            "halves": scales[:, : blocks // 8 * 9].copy().view(np.uint16),
        }
    x = rng.standard_normal((ROWS, blocks * 32)).astype(np.float32).view(np.uint64)
    return unused | weights | {"x": x, "y": np.zeros((ROWS, N_OUT), np.float32)}


def launched(world, kernel, arguments):
    bound = world.bind(arguments)
    world.stream.launch(kernel, (-(-N_OUT // 4), ROWS), bound)
    world.stream.synchronize()
    found = sorted((f.code, f.argument, f.access[0].line, f.count) for f in world.findings)
    return found, world.read(bound["y"]).tobytes()


@pytest.mark.parametrize(("kernel", "blocks"), [
    (F16, 5), (F16, 8), (F16, 13), (F16, 17), (Q3_K, 8), (Q3_K, 16),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["x", "halves", None])
def test_bits_and_findings_are_those_of_the_host(kernel, blocks, name):
    arguments = operands(kernel, blocks)
    if name is not None:  # its last element is not written
        arguments[name] = (arguments[name], arguments[name].nbytes - arguments[name].itemsize)
    found, bits = launched(World(device=ptx_device()), kernel, arguments)
    assert (found, bits) == launched(World(), kernel, arguments)
    assert {argument for _, argument, *_ in found} == {name} - {None}


@pytest.mark.parametrize("name", ["x", "codes", "halves"])
def test_a_row_that_is_too_short_is_found(name):
    arguments = operands(Q3_K, 16)
    arguments[name] = arguments[name][:, :-1].copy()
    found, bits = launched(World(device=ptx_device()), Q3_K, arguments)
    assert (found, bits) == launched(World(), Q3_K, arguments)
    assert name == "x" or {argument for _, argument, *_ in found} == {name}


def test_weights_behind_shifts_are_not_checked_in_the_loop():
    source, _ = checked_source(Q3_K.plan, Q3_K.access_table, Q3_K.constants)
    fast = source.partition("e_weight_")[2].partition("@helper")[0]
    assert "load_known(v_codes" in fast
    assert "try_load" not in fast
    assert "sure_load" not in fast


def test_x_of_many_rows_is_looked_up_before_the_loops():
    wide = mul_mat(GGMLQuantizationType.F16, 8, 2)
    source, _ = checked_source(wide.plan, wide.access_table, wide.constants)
    # Of two blocks a step, and of one behind the steps: two pairs a row.
    assert source.count("common_states(") == (2 + 1) * 2 * 8
    assert "sure_load_ro(v_x," not in source
