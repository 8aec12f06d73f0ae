"""Everything outside the dialect is refused with file, line, kernel and reason, at decoration where that can be."""

import re
import textwrap

import pytest
from kernel_source import load_module, marked_line

from instrumentation.errors import KernelDialectError
from instrumentation.kernel import device_function, kernel


def in_kernel(body: str, block: str = "32", parameters: str = "x: f32_1d, y: f32_1d, n: i32") -> str:
    """A kernel around a body; ``t`` is the thread and ``s`` a shared array."""
    start = f"@kernel(block={block})\ndef k({parameters}) -> None:\n    t = cuda.threadIdx.x\n"
    return (
        start
        + "    s = cuda.shared.array(32, float32)\n"
        + textwrap.indent(textwrap.dedent(body).strip("\n"), "    ")
        + "\n"
    )


HELPERS = """
@device_function
def reads(a, i):
    return a[i] + a[i + 1]
@device_function
def reads_two(a, i):
    return a[i, 0]
@device_function
def waits(v):
    cuda.syncthreads()
    return v
@device_function
def only_waits():
    cuda.syncthreads()
"""

# (id, body of the kernel or whole source, reason); the line that is named ends with #!
STATEMENTS = [
    ("try", "try:  #!\n    y[t] = x[t]\nexcept ValueError:\n    pass", "Try is outside"),
    ("with", "with open('f'):  #!\n    y[t] = x[t]", "With is outside"),
    ("lambda", "f = lambda v: v  #!", "Lambda is outside"),
    ("comprehension", "y[t] = [v for v in (1, 2)][0]  #!", "ListComp is outside"),
    ("list", "v = [1, 2]  #!", "List is outside"),
    ("dict", "v = {1: 2}  #!", "Dict is outside"),
    ("nested-def", "def f(v):  #!\n    return v", "FunctionDef is outside"),
    ("assert", "assert n > 0  #!", "Assert is outside"),
    ("raise", "raise ValueError  #!", "Raise is outside"),
    ("import", "import math  #!", "Import is outside"),
    ("global", "global FULL  #!\nFULL = 1", "Global is outside"),
    ("delete", "v = 1\ndel v  #!", "Delete is outside"),
    ("walrus", "if (v := n) > 0:  #!\n    y[t] = v", "NamedExpr is outside"),
    ("match", "match n:  #!\n    case 1:\n        y[t] = 1", "Match is outside"),
    ("f-string", "v = f'{n}'  #!", "JoinedStr is outside"),
    ("starred", "y[t] = max(*x.shape)  #!", "Starred is outside"),
    ("for-else", "for k in range(n):  #!\n    y[t] = k\nelse:\n    y[t] = 0", "for-else"),
    ("while-else", "while n > 9:  #!\n    n -= 1\nelse:\n    y[t] = 0", "while-else"),
    ("for-over-array", "for v in x:  #!\n    y[t] = v", r"runs over range\(\.\.\.\) or over a tuple"),
    ("for-over-tuple-of-variables", "for v in (t, 1):  #!\n    y[t] = v", "wants constants"),
    ("for-two-targets", "for a, b in range(n):  #!\n    y[t] = a", "one plain name"),
    ("range-keywords", "for k in range(n, step=1):  #!\n    y[t] = k", "range takes one to three"),
    ("range-step-0", "for k in range(0, n, 0):  #!\n    y[t] = k", "step 0"),
    ("range-as-value", "v = range(n)  #!", "range outside a for"),
    ("slice", "y[t] = x[1:2][0]  #!", "only a plain array name"),
    ("slice-store", "y[0:2] = 1  #!", "slices"),
    ("ellipsis", "y[...] = 1  #!", "only numbers"),
    ("alias", "z = x  #!\ny[t] = z[t]", "'z' is indexed and is not an array|no aliases"),
    ("array-in-expression", "y[t] = x + 1  #!", "no aliases"),
    ("array-assigned", "x = 1  #!", "assigned as a whole"),
    ("rank", "y[t] = x[t, 0]  #!", "x has 1 dimensions and is indexed with 2"),
    ("index-negative", "y[t] = x[-1]  #!", "from 0"),
    ("index-literal-float", "y[t] = x[1.5]  #!", "whole numbers"),
    ("index-a-scalar", "y[t] = n[0]  #!", "'n' is indexed and is not an array"),
    ("shape-axis", "y[t] = x.shape[1]  #!", "within its rank"),
    ("shape-run-time-axis", "y[t] = x.shape[n]  #!", "within its rank"),
    ("shape-unpack", "a, b = x.shape  #!", "has 1 axes, not 2"),
    ("attribute", "y[t] = x.ndim  #!", r"only \.size"),
    ("method", "y[t] = x.sum()  #!", r"call of x\.sum"),
    ("tuple-swap", "a, b = n, t  #!", "tuple assignment other than"),
    ("tuple-value", "a = (n, t)  #!", "a tuple as a value"),
    ("chained-assignment", "a = b = n  #!", "chained assignment"),
    ("keyword-argument", "y[t] = max(a=1, b=2)  #!", "keyword arguments"),
    ("is", "y[t] = n is t  #!", "comparisons are"),
    ("in", "y[t] = n in (1, 2)  #!", "comparisons are"),
    ("matmul", "y[t] = n @ t  #!", "operator @"),
    ("string", "y[t] = 'a'  #!", "only numbers"),
    ("none", "v = None  #!", "only numbers"),
    ("complex", "v = 1j  #!", "only numbers"),
    ("huge-constant", f"v = {2**64}  #!", "more than 64 bits"),
    ("no-effect", "x[t]  #!", "statement without effect"),
    ("print", "print(n)  #!", "'print' is a Python builtin"),
    ("undefined", "y[t] = missing  #!", "'missing' is not defined"),
    ("captured-list", "y[t] = TABLE[t]  #!", "'TABLE' is indexed and is not an array"),
    ("captured-list-value", "y[t] = TABLE  #!", "captured name 'TABLE' is a list"),
    ("captured-module", "y[t] = math  #!", "captured name 'math' is a module"),
    ("module-attribute", "y[t] = sys.argv  #!", "sys.argv is not a number"),
    ("python-call", "y[t] = sys.getrefcount(n)  #!", "call of sys.getrefcount"),
    ("numpy-call", "y[t] = np.sqrt(x[t])  #!", r"call of np\.sqrt"),
    ("call-a-variable", "y[t] = t(1)  #!", "'t' is a variable and is called"),
    ("type-as-value", "y[t] = float32  #!", "captured name 'float32'"),
    ("cuda-unsupported", "y[t] = cuda.ballot_sync(FULL, n)  #!", "cuda.ballot_sync is outside"),
    ("cuda-syncthreads-count", "y[t] = cuda.syncthreads_count(n)  #!", "cuda.syncthreads_count is outside"),
    ("cuda-threadfence", "cuda.threadfence()  #!", "cuda.threadfence is outside"),
    ("cuda-attribute", "y[t] = cuda.threadIdx  #!", "cuda.threadIdx is outside"),
    ("cuda-atomic-inc", "cuda.atomic.inc(y, 0, 1)  #!", "cuda.atomic.inc is outside"),
    ("atomic-target", "cuda.atomic.add(n, 0, 1)  #!", "plain array name"),
    ("atomic-arguments", "cuda.atomic.add(y, 0)  #!", "takes 3 arguments"),
    ("atomic-rank", "cuda.atomic.add(y, (0, 1), 1)  #!", "y has 1 dimensions"),
    ("grid-3-of-2", "a, b, c = cuda.grid(2)  #!", "as many numbers as names"),
    ("grid-value", "y[t] = cuda.grid(2)  #!", "assigned to a tuple"),
    ("shared-dynamic", "z = cuda.shared.array(0, float32)  #!", "dynamic shared memory"),
    ("shared-run-time", "z = cuda.shared.array(n, float32)  #!", "compile-time constants"),
    ("shared-type", "z = cuda.shared.array(4, n)  #!", "not a number type"),
    ("shared-twice", "s = cuda.shared.array(4, float32)  #!", "assigned more than once"),
    ("shared-in-expression", "y[t] = cuda.shared.array(4, float32)[0]  #!", "only a plain array name"),
    ("shared-keyword", "z = cuda.shared.array(4, float32, alignment=16)  #!", "keyword 'alignment'"),
    (
        "local-argument",
        "z = cuda.local.array(4, float32)\ny[t] = reads(z, 0)  #!",
        "local array 'z' as an argument",
    ),
    ("loop-variable-outside", "for k in range(n):\n    pass\ny[t] = k  #!", "'k' is read outside the loop"),
    ("loop-variable-assigned", "for k in range(n):\n    k = 1  #!", "assigned inside its loop"),
    ("loop-variable-elsewhere", "k = 1  #!\nfor k in range(n):\n    y[t] = k", "assigned outside its loop"),
    (
        "loop-variable-nested",
        "for k in range(n):\n    for k in range(2):  #!\n        y[t] = k",
        "assigned inside its loop",
    ),
    ("return-value", "return n  #!", "a kernel returns nothing"),
    ("return-in-loop", "for k in range(n):\n    return  #!", "return inside a loop"),
    (
        "return-two-deep",
        "if n > 1:  #!\n    if t > 1:\n        return\n    y[t] = 1\ny[t] = 2",
        "under two conditions",
    ),
    ("break-unrolled", "for k in (1, 2):\n    break  #!", "unrolled"),
    ("device-arguments", "y[t] = reads(x)  #!", "reads takes 2 arguments, not 1"),
    ("device-scalar-for-array", "y[t] = reads(n, 0)  #!", "reads wants an array for 'a'"),
    ("device-array-for-scalar", "y[t] = reads(x, x)  #!", "reads wants a number for 'i'"),
    ("device-rank", "y[t] = reads_two(x, 0)  #!", "reads_two wants 2 dimensions for 'a', 'x' has 1"),
    ("device-no-value", "y[t] = only_waits()  #!", "only_waits returns nothing"),
    (
        "barrier-varying-branch",
        "if t > 3:  #!\n    cuda.syncthreads()",
        "branch that differs between threads",
    ),
    (
        "barrier-varying-value",
        "if x[t] > 3:  #!\n    cuda.syncthreads()",
        "branch that differs between threads",
    ),
    ("barrier-written-array", "y[0] = 1\nif y[0] > 0:  #!\n    cuda.syncthreads()", "branch that differs"),
    ("barrier-shared-value", "if s[0] > 0:  #!\n    cuda.syncthreads()", "branch that differs"),
    ("barrier-after-thread-exit", "if t > n:  #!\n    return\ncuda.syncthreads()", "branch that differs"),
    (
        "barrier-varying-loop",
        "for k in range(t):  #!\n    cuda.syncthreads()",
        "count differs between threads",
    ),
    ("barrier-varying-while", "v = t\nwhile v > 0:  #!\n    v -= 1\n    cuda.syncthreads()", "count differs"),
    (
        "barrier-varying-break",
        "for k in range(n):  #!\n    if t == k:\n        break\n    cuda.syncthreads()",
        "count differs between threads",
    ),
    ("barrier-value", "v = cuda.syncthreads()  #!", "a barrier is a statement"),
    ("barrier-argument", "cuda.syncthreads(1)  #!", "no arguments"),
    ("barrier-mask", "cuda.syncwarp(15)  #!", "no arguments"),
    ("device-barrier-branch", "if t > 3:  #!\n    y[t] = waits(t)", "branch that differs between threads"),
    ("shuffle-mask", "y[t] = cuda.shfl_sync(15, n, 0)  #!", "full mask"),
    ("shuffle-run-time-mask", "y[t] = cuda.shfl_sync(n, n, 0)  #!", "full mask"),
    ("shuffle-width", "y[t] = cuda.shfl_xor_sync(FULL, n, 1, 16)  #!", "no width"),
    ("shuffle-conditional", "y[t] = cuda.shfl_sync(FULL, n, 0) if n > 0 else 0  #!", "not always evaluated"),
    ("shuffle-and", "if n > 0 and cuda.shfl_sync(FULL, n, 0):  #!\n    y[t] = 1", "not always evaluated"),
    ("shuffle-chained", "y[t] = 0 < n < cuda.shfl_sync(FULL, n, 0)  #!", "chained comparison"),
    ("shuffle-while", "while cuda.shfl_sync(FULL, n, 0) > 0:  #!\n    n -= 1", "loop's condition"),
    ("shuffle-branch", "if t > 1:  #!\n    y[t] = cuda.shfl_sync(FULL, n, 0)", "branch that differs"),
]


def check(source: str, reason: str, tmp_path, name: str = "k") -> None:
    path = tmp_path / "refused.py"
    with pytest.raises(KernelDialectError) as caught:
        load_module(path, source)
    message = str(caught.value)
    assert message.startswith(f"{path}:{marked_line(source)}: {name}: "), message
    assert re.search(reason, message), message


@pytest.mark.parametrize(("body", "reason"), [c[1:] for c in STATEMENTS], ids=[c[0] for c in STATEMENTS])
def test_statements(body, reason, tmp_path):
    check(HELPERS + in_kernel(body), reason, tmp_path)


WHOLE = [
    (
        "block-not-warps",
        "@kernel(block=48)\ndef k(y: f32_1d) -> None:\n    y[0] = cuda.shfl_sync(FULL, cuda.laneid, 0)  #!\n",
        "a multiple of 32",
    ),
    (
        "no-annotation",
        "@kernel(block=32)\ndef k(x, y: f32_1d) -> None:  #!\n    pass\n",
        r"\['x'\] have no type",
    ),
    (
        "other-annotation",
        "@kernel(block=32)\ndef k(n: int) -> None:  #!\n    pass\n",
        r"\['n'\] have no type",
    ),
    (
        "unknown-annotation",
        "@kernel(block=32)  #!\ndef k(n: 'missing') -> None:\n    pass\n",
        "annotations cannot be read",
    ),
    ("default", "@kernel(block=32)\ndef k(n: i32 = 1) -> None:  #!\n    pass\n", "without defaults"),
    ("varargs", "@kernel(block=32)\ndef k(*n: i32) -> None:  #!\n    pass\n", "only plain positional"),
    ("keyword-only", "@kernel(block=32)\ndef k(*, n: i32) -> None:  #!\n    pass\n", "only plain positional"),
    (
        "shared-too-large",
        (
            "@kernel(block=32)\ndef k(y: f32_1d) -> None:  #!\n"
            "    s = cuda.shared.array(20000, float32)\n    y[0] = s[0]\n"
        ),
        "a block has 49152",
    ),
    (
        "local-too-large",
        (
            "@kernel(block=1024)\ndef k(y: f32_1d) -> None:  #!\n"
            "    s = cuda.local.array(200, float32)\n    y[0] = s[0]\n"
        ),
        "local arrays of 819200 bytes",
    ),
    (
        "parameter-counts",
        (
            "@kernel(block=32)\ndef k(y: f32_1d, n: i32) -> None:  #!\n"
            "    for n in range(3):\n        y[0] = n\n"
        ),
        "parameter 'n' is also a loop variable",
    ),
    (
        "unrolled-too-far",
        "@kernel(block=32)\ndef k(y: f32_1d) -> None:\n"
        + "".join(f"{'    ' * (d + 1)}for i{d} in (1, 2, 3, 4, 5, 6, 7, 8, 9):\n" for d in range(5))
        + "    " * 6
        + "y[0] = i0  #!\n",
        "more than 20000 statements",
    ),
]


@pytest.mark.parametrize(("source", "reason"), [c[1:] for c in WHOLE], ids=[c[0] for c in WHOLE])
def test_whole_kernels(source, reason, tmp_path):
    check(source, reason, tmp_path)


DEVICE = [
    (
        "early-value",
        "def d(v):\n    if v > 0:\n        return v  #!\n    cuda.syncthreads()\n    return 1\n",
        "returns at its end only",
    ),
    (
        "return-in-loop",
        "def d(v):\n    for k in range(v):\n        return  #!\n    cuda.syncthreads()\n",
        "return inside a loop",
    ),
    (
        "two-ranks",
        "def d(a):\n    return a[0] + a[0, 1]  #!\n",
        "used with 1 and with 2 dimensions|with 2 and with 1",
    ),
    ("captured", "def d(v):\n    return v + TABLE  #!\n", "captured name 'TABLE'"),
    ("array-assigned", "def d(a):\n    v = a[0]\n    a = v  #!\n", "array 'a' is assigned as a whole"),
]


@pytest.mark.parametrize(("source", "reason"), [c[1:] for c in DEVICE], ids=[c[0] for c in DEVICE])
def test_device_functions(source, reason, tmp_path):
    check("@device_function\n" + source, reason, tmp_path, name="d")


# What only types can tell is refused at the first compilation.
TYPED = [
    ("float-index", "v = x[t]\ny[v] = 1  #!", "the types do not fit.*an index of type float32"),
    ("shuffle-of-bytes", "y[t] = cuda.shfl_sync(FULL, uint8(n), 0)  #!", "a shuffle of uint8"),
    ("shuffle-of-bools", "v = n > t\ny[t] = cuda.shfl_sync(FULL, v, 0)  #!", "a shuffle of bool"),
    ("bits-of-floats", "y[t] = x[t] & 1  #!", "the types do not fit"),
    (
        "float-kinds",
        "v = x[t]\ncuda.syncthreads()\nv = v * 0.5  #!\ncuda.syncthreads()\ny[t] = v",
        "'v' is float32 and float64",
    ),
    (
        "int-and-float",
        "v = t\ncuda.syncthreads()\ny[t] = v\nv = x[t]  #!\ncuda.syncthreads()\ny[t] = v",
        "'v' is float32 and int64",
    ),
]


@pytest.mark.parametrize(("body", "reason"), [c[1:] for c in TYPED], ids=[c[0] for c in TYPED])
def test_types(body, reason, tmp_path):
    source = in_kernel(body)
    path = tmp_path / "refused.py"
    module = load_module(path, source)
    with pytest.raises(KernelDialectError) as caught:
        module.k.host()
    message = str(caught.value)
    assert message.startswith(f"{path}:{marked_line(source)}: k: "), message
    assert re.search(reason, message), message


@pytest.mark.parametrize("block", [0, -1, 2000, (), (1, 2, 3, 4), (32, 0), (1, 1, 128), (2.5,), (True,)])
def test_blocks(block):
    with pytest.raises(KernelDialectError, match=r"block .*: one to three positive extents"):
        kernel(block=block)


def test_source_that_is_no_file():
    namespace = {}
    exec("def k():\n    pass\n", namespace)  # noqa: S102
    with pytest.raises(KernelDialectError, match="k: the source cannot be read; kernels stand in a file"):
        device_function(namespace["k"])


def test_what_is_no_function():
    with pytest.raises(KernelDialectError, match="is not a plain Python function"):
        device_function(max)
    with pytest.raises(KernelDialectError, match=r"is not a plain Python function|kernel is a plain def"):
        kernel(block=32)(print)
    with pytest.raises(KernelDialectError, match="a kernel is a plain def"):
        device_function(lambda v: v)


def test_deep_nesting_ends_in_a_refusal(tmp_path):
    body = "v = n" + " + n" * 700 + "\ny[t] = v"
    with pytest.raises(KernelDialectError, match="nested too deeply"):
        load_module(tmp_path / "deep.py", in_kernel(body))


def test_calling_a_kernel_from_python(tmp_path):
    module = load_module(tmp_path / "called.py", in_kernel("y[t] = x[t]"))
    with pytest.raises(KernelDialectError, match="k is a kernel: launch it"):
        module.k(1)
