"""Products by a library: arguments checked against the views that they name, then one call of the library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from instrumentation.errors import BadInputError
from instrumentation.handles import LibraryCall, LibraryCalls, LibraryHandle
from instrumentation.view import View

if TYPE_CHECKING:
    from typing import TypeAlias

    BlasHandle: TypeAlias = "LibraryHandle[BlasCalls]"

#: sizes are C's int
_MOST = 2**31 - 1


class BlasCalls(LibraryCalls, Protocol):
    """A library of linear algebra, whose matrices lie column by column: element (i, j) is ``i + j * ld``."""

    def sgemm(
        self,
        handle: int,
        trans_a: bool,
        trans_b: bool,
        m: int,
        n: int,
        k: int,
        alpha: float,
        a: int,
        lda: int,
        b: int,
        ldb: int,
        beta: float,
        c: int,
        ldc: int,
    ) -> None:
        """Queue C = alpha * op(A) op(B) + beta * C, all float32: op(A) m x k, op(B) k x n, C m x n, by address."""
        ...


def product(handle: BlasHandle, x: View, weight: View, y: View) -> LibraryCall:
    """Product y = x W^T: x [n_rows, n_in], weight [n_out, n_in], y [n_rows, n_out], all float32.

    Raises ``BadInputError``.
    """
    shapes = x.shape, weight.shape, y.shape
    if any(len(shape) != 2 for shape in shapes) or (*x.shape, weight.shape[0]) != (
        y.shape[0],
        weight.shape[1],
        y.shape[1],
    ):
        raise BadInputError(
            f"product of {x.name} {x.shape} and {weight.name} {weight.shape} into {y.name} {y.shape}; give "
            "[n_rows, n_in], [n_out, n_in] and [n_rows, n_out]"
        )
    (n_rows, n_in), n_out = x.shape, y.shape[1]
    # Rows here are columns to the library: it computes y^T = W x^T.
    return sgemm(handle, weight, x, y, m=n_out, n=n_rows, k=n_in, lda=n_in, ldb=n_in, ldc=n_out, trans_a=True)


def sgemm(
    handle: BlasHandle,
    a: View,
    b: View,
    c: View,
    *,
    m: int,
    n: int,
    k: int,
    lda: int,
    ldb: int,
    ldc: int,
    trans_a: bool = False,
    trans_b: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> LibraryCall:
    """C = alpha * op(A) op(B) + beta * C, as ``BlasCalls.sgemm``, of float32 views whose shape does not matter.

    Raises ``BadInputError`` when a size or leading dimension is none, or a matrix reaches past its view.
    """
    for name, size in (("m", m), ("n", n), ("k", k)):
        if not 1 <= size <= _MOST:
            raise BadInputError(f"sgemm: {name} is {size}; give 1 to {_MOST}")
    # Stored rows and columns of each matrix: a transposed one lies the other way.
    stored_a, stored_b = (k, m) if trans_a else (m, k), (n, k) if trans_b else (k, n)
    for name, view, (rows, columns), ld in (
        ("a", a, stored_a, lda),
        ("b", b, stored_b, ldb),
        ("c", c, (m, n), ldc),
    ):
        _require_inside(name, view, rows, columns, ld)

    def run(value: int) -> None:
        handle.library.calls.sgemm(
            value, trans_a, trans_b, m, n, k, alpha, a.address, lda, b.address, ldb, beta, c.address, ldc
        )

    numbers: dict[str, View | int | float] = {
        "m": m, "n": n, "k": k, "lda": lda, "ldb": ldb, "ldc": ldc, "trans_a": int(trans_a), "trans_b": int(trans_b),
        "alpha": alpha, "beta": beta,
    }  # fmt: skip
    # Which code the library loads depends on the sizes.
    key = (trans_a, trans_b, m, n, k)
    arguments = {"a": a, "b": b, "c": c, **numbers}
    return LibraryCall.of(handle, f"{handle.library.name}.sgemm", arguments, frozenset({"c"}), run, key)


def _require_inside(name: str, view: View, rows: int, columns: int, ld: int) -> None:
    if not isinstance(view, View) or view.dtype != np.float32:
        seen = f"view {view.name} of {view.dtype}" if isinstance(view, View) else type(view).__name__
        raise BadInputError(f"sgemm: argument {name} is {seen}; give a view of float32")
    if not rows <= ld <= _MOST:
        raise BadInputError(f"sgemm: ld{name} is {ld}; give {rows}, the rows of {name}, to {_MOST}")
    end = (columns - 1) * ld + rows
    if end > view.size:
        raise BadInputError(
            f"sgemm: argument {name}, {rows} x {columns} with ld{name} {ld}, reaches element {end - 1} of view "
            f"{view.name}, which has {view.size}; give a larger view or a smaller matrix"
        )
