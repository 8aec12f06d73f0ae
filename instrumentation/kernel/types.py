"""Annotations of kernel parameters: what mypy reads as NumPy arrays, ``@kernel`` reads as a Numba signature.

``f32_2d`` is a C-contiguous two-dimensional float32 array, ``i32`` a scalar. Halves are kept as ``u16`` (their
bits), since Numba's CPU target has no float16; ``intrinsics.f16_to_f32`` converts them.
"""

from __future__ import annotations

from typing import Annotated, Any, get_type_hints

import numpy as np
import numpy.typing as npt
from numba import types as nb

f32 = Annotated[float, nb.float32]
f64 = Annotated[float, nb.float64]
i32 = Annotated[int, nb.int32]
i64 = Annotated[int, nb.int64]
u32 = Annotated[int, nb.uint32]
u64 = Annotated[int, nb.uint64]

f32_1d = Annotated[npt.NDArray[np.float32], nb.float32[::1]]
f32_2d = Annotated[npt.NDArray[np.float32], nb.float32[:, ::1]]
f32_3d = Annotated[npt.NDArray[np.float32], nb.float32[:, :, ::1]]
f32_4d = Annotated[npt.NDArray[np.float32], nb.float32[:, :, :, ::1]]
f64_1d = Annotated[npt.NDArray[np.float64], nb.float64[::1]]
f64_2d = Annotated[npt.NDArray[np.float64], nb.float64[:, ::1]]
f64_3d = Annotated[npt.NDArray[np.float64], nb.float64[:, :, ::1]]
f64_4d = Annotated[npt.NDArray[np.float64], nb.float64[:, :, :, ::1]]
i8_1d = Annotated[npt.NDArray[np.int8], nb.int8[::1]]
i8_2d = Annotated[npt.NDArray[np.int8], nb.int8[:, ::1]]
i8_3d = Annotated[npt.NDArray[np.int8], nb.int8[:, :, ::1]]
i8_4d = Annotated[npt.NDArray[np.int8], nb.int8[:, :, :, ::1]]
i16_1d = Annotated[npt.NDArray[np.int16], nb.int16[::1]]
i16_2d = Annotated[npt.NDArray[np.int16], nb.int16[:, ::1]]
i16_3d = Annotated[npt.NDArray[np.int16], nb.int16[:, :, ::1]]
i16_4d = Annotated[npt.NDArray[np.int16], nb.int16[:, :, :, ::1]]
i32_1d = Annotated[npt.NDArray[np.int32], nb.int32[::1]]
i32_2d = Annotated[npt.NDArray[np.int32], nb.int32[:, ::1]]
i32_3d = Annotated[npt.NDArray[np.int32], nb.int32[:, :, ::1]]
i32_4d = Annotated[npt.NDArray[np.int32], nb.int32[:, :, :, ::1]]
i64_1d = Annotated[npt.NDArray[np.int64], nb.int64[::1]]
i64_2d = Annotated[npt.NDArray[np.int64], nb.int64[:, ::1]]
i64_3d = Annotated[npt.NDArray[np.int64], nb.int64[:, :, ::1]]
i64_4d = Annotated[npt.NDArray[np.int64], nb.int64[:, :, :, ::1]]
u8_1d = Annotated[npt.NDArray[np.uint8], nb.uint8[::1]]
u8_2d = Annotated[npt.NDArray[np.uint8], nb.uint8[:, ::1]]
u8_3d = Annotated[npt.NDArray[np.uint8], nb.uint8[:, :, ::1]]
u8_4d = Annotated[npt.NDArray[np.uint8], nb.uint8[:, :, :, ::1]]
u16_1d = Annotated[npt.NDArray[np.uint16], nb.uint16[::1]]
u16_2d = Annotated[npt.NDArray[np.uint16], nb.uint16[:, ::1]]
u16_3d = Annotated[npt.NDArray[np.uint16], nb.uint16[:, :, ::1]]
u16_4d = Annotated[npt.NDArray[np.uint16], nb.uint16[:, :, :, ::1]]
u32_1d = Annotated[npt.NDArray[np.uint32], nb.uint32[::1]]
u32_2d = Annotated[npt.NDArray[np.uint32], nb.uint32[:, ::1]]
u32_3d = Annotated[npt.NDArray[np.uint32], nb.uint32[:, :, ::1]]
u32_4d = Annotated[npt.NDArray[np.uint32], nb.uint32[:, :, :, ::1]]
u64_1d = Annotated[npt.NDArray[np.uint64], nb.uint64[::1]]
u64_2d = Annotated[npt.NDArray[np.uint64], nb.uint64[:, ::1]]
u64_3d = Annotated[npt.NDArray[np.uint64], nb.uint64[:, :, ::1]]
u64_4d = Annotated[npt.NDArray[np.uint64], nb.uint64[:, :, :, ::1]]


def signature_of(function: Any) -> dict[str, Any]:
    """Numba type of each annotated parameter of ``function``; parameters without annotation are left out."""
    hints = get_type_hints(function, include_extras=True)
    hints.pop("return", None)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}
