"""Strict kernels refuse float arithmetic whose bits depend on the lowering."""

import re

import pytest
from kernel_source import load_module, marked_line

from instrumentation.errors import KernelDialectError

HELPERS = """
@device_function
def times(a, b):
    return a * b
@device_function
def plus(a, b):
    return a + b{mark}
@device_function
def twice(a, b):
    c = times(a, b)
    return c
"""


def source_of(
    body: str, strict: bool = True, parameters: str = "x: f32_1d, y: f32_1d, n: i32", mark: str = ""
) -> str:
    start = f"@kernel(block=32, strict={strict})\ndef k({parameters}) -> None:\n"
    start += "    t = cuda.threadIdx.x\n    v = x[t]\n"
    return HELPERS.format(mark=mark) + start + "".join(f"    {line}\n" for line in body.splitlines())


CONTRACTED = "a \\* b \\+ c may be contracted: write cuda.fma"
DOUBLE = "float64 arithmetic in a float32 kernel"
REFUSED = [
    ("literal", "y[t] = v * 0.5  #!", DOUBLE),
    ("literal-in-a-name", "h = 0.5\ny[t] = v * h  #!", DOUBLE),
    ("literal-in-min", "y[t] = min(v, 0.5)  #!", DOUBLE),
    ("literal-in-fma", "y[t] = cuda.fma(v, v, 0.5)  #!", DOUBLE),
    ("literal-in-a-conditional", "w = v if t > 3 else 0.5  #!\ny[t] = w", DOUBLE),
    ("integer-division", "y[t] = t / n  #!", DOUBLE),
    ("integer-times-float", "y[t] = t * v  #!", DOUBLE),
    ("sum", "y[t] = v * v + v  #!", CONTRACTED),
    ("difference", "y[t] = v - v * v  #!", CONTRACTED),
    ("minus-assigned", "w = v\nw -= v * v  #!\ny[t] = w", CONTRACTED),
    ("plus-assigned-to-an-element", "y[t] += v * v  #!", CONTRACTED),
    ("named", "p = v * v\nq = p\ny[t] = q + v  #!", CONTRACTED),
    ("negated", "p = -(v * v)\ny[t] = p + v  #!", CONTRACTED),
    ("converted", "y[t] = float32(v * v) + v  #!", CONTRACTED),
    ("times-assigned", "w = v\nw *= v\ny[t] = w + v  #!", CONTRACTED),
    ("over-a-barrier", "p = v * v\ncuda.syncthreads()\ny[t] = p + v  #!", CONTRACTED),
    ("in-a-loop", "w = v\nfor k in range(n):\n    w = w * v\n    w = w + v  #!\ny[t] = w", CONTRACTED),
    ("conditional", "p = v * v if t > 3 else v\ny[t] = p + v  #!", CONTRACTED),
    ("out-of-a-function", "y[t] = times(v, v) + v  #!", CONTRACTED),
    ("out-of-two-functions", "y[t] = v + twice(v, v)  #!", CONTRACTED),
]


@pytest.mark.parametrize(("body", "reason"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED])
def test_refused(body, reason, tmp_path):
    source = source_of(body)
    path = tmp_path / "strict.py"
    module = load_module(path, source)
    with pytest.raises(KernelDialectError) as caught:
        module.k.host()
    assert str(caught.value).startswith(f"{path}:{marked_line(source)}: k: "), caught.value
    assert re.search(reason, str(caught.value)), caught.value


def test_a_product_that_goes_into_a_function_is_refused_there(tmp_path):
    source = source_of("y[t] = plus(times(v, v), v)", mark="  #!")
    module = load_module(tmp_path / "strict.py", source)
    with pytest.raises(KernelDialectError, match=rf"strict.py:{marked_line(source)}: plus: .*{CONTRACTED}"):
        module.k.host()


@pytest.mark.parametrize(("body", "reason"), [c[1:] for c in REFUSED[:1] + REFUSED[8:9]])
def test_kernels_of_other_people_are_taken_as_they_are(body, reason, tmp_path):
    assert load_module(tmp_path / "loose.py", source_of(body, strict=False)).k.host().address


ALLOWED = """y[t] = cuda.fma(v, v, v)
w = float32(0.5) * v
y[t] = w * float32(n)
i = t * n + 3
if v > 0.25:
    y[i % 32] = 0.5
y[t] = plus(v, w / v) + math.sqrt(v)
z = v + w
y[t] = z * v"""


def test_allowed(tmp_path):
    source = source_of(ALLOWED.replace("w = float32(0.5) * v", "w = float32(0.5)"))
    assert load_module(tmp_path / "strict.py", source).k.host().address


def test_a_float64_parameter_permits_float64(tmp_path):
    parameters = "x: f64_1d, y: f64_1d, n: i32"
    assert load_module(tmp_path / "a.py", source_of("y[t] = v * 0.5", parameters=parameters)).k.host().address
    module = load_module(tmp_path / "b.py", source_of("y[t] = v * 0.5 + v", parameters=parameters))
    with pytest.raises(KernelDialectError, match=CONTRACTED):
        module.k.host()
