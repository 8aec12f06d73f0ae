"""Dumps have the form of llama-eval-callback's logs."""

from __future__ import annotations

import numpy as np
import pytest
from golden_runs import made, of

from refengine.golden.case import Step
from refengine.golden.dump import dump


def test_a_small_tensor_is_printed_whole():
    step = Step("attn_norm-0", "rms_norm", (2, 3), (("blk.0.attn_norm.weight", (3,)), ("inp_embd", (2, 3))))
    array = np.float32([[1, -2.5, 3], [1e6, 0.00004, -0.0]])
    assert list(dump(of({"attn_norm-0": array}, steps=(step,)))) == [
        (
            "common_debug_cb_eval:              attn_norm-0 = (f32)        MUL(inp_embd{3, 2, 1, 1}, "
            "blk.0.attn_norm.weight{3, 1, 1, 1}}) = {3, 2, 1, 1}"
        ),
        "    [",
        "        [",
        "            [      1.0000,      -2.5000,       3.0000  ],",
        "            [1000000.0000,       0.0000,      -0.0000  ],",
        "        ],",
        "    ]",
        "    sum = 1000001.500000",
    ]


def test_a_large_one_at_its_ends_with_the_sum_of_all():
    array = np.ones((8, 7, 9), np.float32)
    lines = list(dump(of({"x": array})))
    assert lines[0] == "common_debug_cb_eval:                        x = (f32)       NONE(, }) = {9, 7, 8, 1}"
    row = "            [      1.0000,       1.0000,       1.0000,    ...,       1.0000,       1.0000,       1.0000  ],"
    cube = ["        [", *[row] * 3, "            ..., ", *[row] * 3, "        ],"]
    assert lines[1:] == ["    [", *cube * 3, "        ..., ", *cube * 3, "    ]", "    sum = 504.000000"]


def test_whole_numbers_are_printed_and_names_are_chosen():
    recording = of({"ffn_moe_topk-0": np.int32([[3, 1]]), "l_out-0": np.float32([[1]])})
    lines = list(dump(recording, ("*topk*",)))
    assert lines[0].split(" = ")[1] == "(i32)       NONE(, })"
    assert lines[3] == "            [      3.0000,       1.0000  ],"
    assert not any("l_out" in line for line in lines)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_printed(value):
    lines = list(dump(of({"x": np.float32([value, 1])})))
    assert lines[3] == f"            [{value:12.4f},       1.0000  ],"
    assert lines[-1] == f"    sum = {value}"


def test_of_an_engine_operations_and_sources_are_named():
    recording = made("llama", n_tokens=2, n_predict=0)
    headers = [line for line in dump(recording) if line.startswith("common_debug_cb_eval: ")]
    assert len(headers) == len(recording.tensors)
    assert headers[0].endswith(
        "inp_embd = (f32)   GET_ROWS(token_embd.weight{64, 320, 1, 1}, tokens{2, 1, 1, 1}}) = {64, 2, 1, 1}"
    )
    assert headers[1].endswith(
        "attn_out-0 = (f32)    MUL_MAT(blk.0.attn_output.weight{64, 64, 1, 1}, kqv_out-0{64, 2, 1, 1}}) "
        "= {64, 2, 1, 1}"
    )
