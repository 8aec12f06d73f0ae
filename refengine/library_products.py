"""Products of many rows by a library: which they are, and the handle and memory that a context has for them.

The library takes float32. So a quantised matrix is expanded into memory of the context right before its product, one
after the other into the same memory; a product of few rows is not worth that, and stays with the kernels that read the
quantised weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from gguf import GGMLQuantizationType

from instrumentation.blas import product
from instrumentation.errors import BadInputError
from instrumentation.handles import LibraryHandle
from instrumentation.reservation import BufferRequest
from refengine.graph import Graph
from refengine.kernels.mul_mat import expand
from refengine.operands import Call

if TYPE_CHECKING:
    from collections.abc import Iterable

    from instrumentation.blas import BlasCalls, BlasHandle
    from instrumentation.devices.base import Device, Stream
    from instrumentation.handles import Library, LibraryCall
    from instrumentation.ownership import Owner
    from instrumentation.view import View
    from refengine.graph import Node
    from refengine.weights import Matrix

#: rows of x from which on a product is the library's
LEAST_ROWS = 16
#: what NVIDIA recommends for compute capability 9.0; it recommends less for others
WORKSPACE_NBYTES = 32 << 20
#: name of the operation, and of the arena
GEMM, ARENA = "gemm", "gemm"


def by_library(graph: Graph) -> Graph:
    """The graph with its products of many rows as operations of their own, which are joined with no others.

    The vocabulary head is none of them: it has a row for each wanted token, which are few, and the largest matrix.
    """

    def changed(node: Node) -> Node:
        if node.op != "mul_mat":
            return node
        x = graph.tensors[node.tensors["x"]]
        takes = x.rows == "tokens" and x.shape[0] >= LEAST_ROWS
        return replace(node, op=GEMM) if takes else node

    return Graph(
        graph.shape, graph.rows, graph.prefix, [changed(node) for node in graph.nodes], graph.tensors
    )


def requests(graphs: Iterable[Graph], owner: Owner) -> list[BufferRequest]:
    """Buffers that products of these graphs need: workspace, and the largest matrix as float32. None without any."""
    sizes = [
        graph.tensors[node.tensors["x"]].shape[1] * graph.tensors[node.results[0]].shape[1] * 4
        for graph in graphs
        for node in graph.nodes
        if node.op == GEMM
    ]
    if not sizes:
        return []
    return [
        BufferRequest(nbytes=WORKSPACE_NBYTES, owner=owner, name=f"{ARENA}.workspace"),
        BufferRequest(nbytes=max(sizes), owner=owner, name=f"{ARENA}.weights"),
    ]


def open_library(device: Device) -> Library[BlasCalls]:
    """The device's cuBLAS. Raises ``BadInputError`` in one line where there is none."""
    library = device.blas()
    if library.name != "cublas":
        raise BadInputError(
            f"gemm cublas: device {device.name} has no cuBLAS; use device cuda, or gemm kernels"
        )
    return library


@dataclass(frozen=True)
class ExpandedProduct:
    """A product by the library, behind the launch that expands its matrix; None: it is float32 already."""

    expansion: Call | None
    call: LibraryCall

    def queue(self, stream: Stream) -> None:
        """Queue both."""
        if self.expansion is not None:
            self.expansion.queue(stream)
        stream.call(self.call)


class LibraryProducts:
    """One context's handle, on its stream, with its workspace, and memory for an expanded matrix [float32]."""

    def __init__(self, device: Device, stream: Stream, owner: Owner, workspace: View, weights: View) -> None:
        self.weights = weights
        self.handle: BlasHandle = LibraryHandle.on(device, open_library(device), owner, "gemm")
        try:
            self.handle.set_workspace(workspace)
            self.handle.set_stream(stream)
        except BaseException:
            self.handle.destroy()
            raise

    def product(self, matrix: Matrix, x: View, y: View) -> ExpandedProduct:
        """Product y = x W^T: x [n_rows, n_in], y [n_rows, n_out]."""
        shape = (matrix.n_out, matrix.n_in)
        if matrix.type == GGMLQuantizationType.F32:
            words = matrix.words
            weight = words.buffer.view(np.float32, shape, offset=words.offset, name=words.name)
            return ExpandedProduct(None, product(self.handle, x, weight, y))
        weight = self.weights.buffer.view(np.float32, shape, name=self.weights.name)
        expansion = Call(expand(matrix.type), matrix.n_out, {**matrix.arguments, "y": weight})
        return ExpandedProduct(expansion, product(self.handle, x, weight, y))

    def release(self) -> None:
        """Give the handle up; its memory is the context's."""
        self.handle.destroy()
