import importlib.util
import re
from pathlib import Path

import numpy as np
from kernel_runner import run_all

from instrumentation.kernel import intrinsics, types
from instrumentation.kernel.dialect_expressions import ATOMICS

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "kernel-dialect.md").read_text(encoding="utf-8")


def test_the_example_runs(tmp_path):
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    path = tmp_path / "example.py"
    path.write_text(code, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rng = np.random.default_rng(0)
    for columns in (1, 100, 576):
        x = rng.standard_normal((3, columns)).astype(np.float32)
        weight = rng.standard_normal(columns).astype(np.float32)
        *_, y = run_all(module.rms_norm, 3, x, weight, np.full_like(x, np.nan), 1e-5)
        np.testing.assert_allclose(y, module.rms_norm_f64(x, weight, 1e-5), rtol=1e-5)
    assert module.rms_norm.reads == {"x", "weight"}
    assert module.rms_norm.writes == {"y"}
    assert "fma.rn.f32" in module.rms_norm.ptx((9, 0))


def test_the_page_names_what_there_is():
    for name in (*vars(intrinsics), *ATOMICS):
        if isinstance(vars(intrinsics).get(name), intrinsics.Intrinsic) or name in ATOMICS:
            assert re.search(rf"\b{name}\b", PAGE), f"{name} is not on the page"
    for kind in ("f32", "f64", "i32", "i64", "u32", "u64"):
        assert hasattr(types, kind)
    for kind in ("f32", "f64", "i8", "i64", "u8", "u64"):
        assert all(hasattr(types, f"{kind}_{axes}d") for axes in range(1, 5))
