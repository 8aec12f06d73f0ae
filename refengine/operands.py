"""What a node of a graph becomes: its names resolved to memory, and the launch that it stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from instrumentation.devices.base import Stream
    from instrumentation.devices.launch import Argument
    from instrumentation.kernel import Kernel
    from instrumentation.view import View
    from refengine.graph import Setting
    from refengine.kernels.kv_types import CacheType
    from refengine.library_products import LibraryProducts
    from refengine.weights import Matrix


@dataclass(frozen=True)
class Operands:
    """Everything that a node names, resolved to memory."""

    #: what the node reads, and its further results
    tensors: Mapping[str, View]
    output: View | None
    vectors: Mapping[str, View]
    matrices: Mapping[str, Matrix]
    settings: Mapping[str, Setting]
    #: keys and values of the node's layer
    cache: tuple[View, View] | None
    #: convolution history and matrices of the node's layer
    recurrent: tuple[View, View] | None
    #: element types of keys and of values
    cache_types: tuple[CacheType, CacheType]
    #: cosine and sine tables
    rotary: tuple[View, View]
    #: persistent buffers of the context, rows of one width
    buffers: Mapping[str, View]
    #: whether products run in the form for a GPU: ``Device.wide_loads``
    wide: bool = False
    #: the library that products of many rows are given to; None without one
    library: LibraryProducts | None = None

    @property
    def y(self) -> View:
        """The output of a node that has one."""
        assert self.output is not None
        return self.output


class Step(Protocol):
    """What an operation puts on a stream."""

    def queue(self, stream: Stream) -> None:
        """Queue it."""
        ...


@dataclass(frozen=True)
class Call:
    """A kernel with its grid and arguments."""

    kernel: Kernel
    grid: int | tuple[int, ...]
    arguments: dict[str, Argument]

    def queue(self, stream: Stream) -> None:
        """Launch it."""
        stream.launch(self.kernel, self.grid, self.arguments)


def ceil_div(n: int, unit: int) -> int:
    """Pieces of ``unit`` that hold n."""
    return -(-n // unit)
