"""Copies of a graph's tensors, taken behind the launch that makes each, before its memory is used again."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np

from refengine.errors import RequestError
from refengine.golden.case import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from instrumentation.view import View
    from refengine.context import Context
    from refengine.golden.case import Array
    from refengine.graph import Graph, Node

#: what is recorded unless asked for: results of each layer's halves and of the model, states, the MTP block
DEFAULT = (
    "inp_embd", "attn_out*", "attn_output-*", "linear_attn_out*", "l_out*", "h_nextn", "result_norm",
    "result_output", "conv_state-*", "s_state-*", "mtp_tok_embd*", "mtp_h_input*", "mtp_enorm*", "mtp_hnorm*",
    "mtp_concat*", "mtp_eh_proj*", "mtp_attn_out*", "mtp_post_ffn*", "mtp_h_nextn", "mtp_result_norm",
    "mtp_result_output",
)  # fmt: skip
ALL = ("*",)
#: a prefix of names in the graph of a draft context
MTP = "mtp_"
#: operations whose results depend on the batch's extents and have parts that nobody writes or reads
_INTERNAL = ("attention", "best_of_chunks", "best_of_rows")
#: recurrent state -> the tensor that is computed with it
STATES = {"conv_state": "conv_output_silu", "s_state": "delta_output"}
#: bytes of a recording in memory
MAX_NBYTES = 4 << 30


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of the patterns, in which ``*`` stands for anything, describes a name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class TensorTap:
    """A context's tap, which collects wanted tensors of all micro-batches of a prompt.

    ``n_rows``: rows that will be recorded. Raises ``RequestError`` at the first launch for more than ``MAX_NBYTES``.
    """

    def __init__(
        self, context: Context, wanted: Callable[[str], bool], n_rows: int, prefix: str = ""
    ) -> None:
        self.context = context
        self.wanted = wanted
        self.n_rows = n_rows
        self.prefix = prefix
        self.steps: list[Step] = []
        self._known: set[str] = set()
        self._parts: dict[str, list[Array]] = {}

    def name_of(self, tensor: str) -> str:
        """Name in the recording."""
        return tensor if tensor.startswith(self.prefix) else self.prefix + tensor

    def __call__(self, graph: Graph, node: Node, views: Mapping[str, View]) -> None:
        """Queue copies of a node's results; their bytes are there when the stream was waited for."""
        if not self.steps:
            self._check_size(graph)
        if node.op in _INTERNAL:
            return
        for tensor in node.results:
            name = self.name_of(tensor)
            if name not in self._known:
                self._known.add(name)
                self.steps.append(self._step(graph, node, tensor))
            if self.wanted(name):
                array = np.empty(views[tensor].shape, views[tensor].dtype)
                self._parts.setdefault(name, []).append(array)
                self.context.stream.copy_out(array, views[tensor])

    def _check_size(self, graph: Graph) -> None:
        internal = {tensor for node in graph.nodes if node.op in _INTERNAL for tensor in node.results}
        nbytes = sum(
            spec.nbytes // spec.shape[0] * self.n_rows
            for spec in graph.tensors.values()
            if spec.kind != "input" and spec.name not in internal and self.wanted(self.name_of(spec.name))
        )
        if nbytes > MAX_NBYTES:
            raise RequestError(
                f"the tensors of {self.n_rows} rows have {nbytes} bytes; want at most {MAX_NBYTES}: record the last "
                "--rows, or fewer --tensors"
            )

    def _step(self, graph: Graph, node: Node, tensor: str) -> Step:
        plan = self.context.executor.operations.weights.plan
        weights = tuple((weight, tuple(plan.shapes[weight])) for weight in node.weights.values())
        inputs = tuple((self.name_of(name), self._shape(graph, name)) for name in node.tensors.values())
        return Step(self.name_of(tensor), node.op, self._shape(graph, tensor), (*weights, *inputs))

    def _shape(self, graph: Graph, tensor: str) -> tuple[int, ...]:
        """As if all recorded rows were one micro-batch."""
        spec = graph.tensors[tensor]
        return spec.shape if spec.rows == "fixed" else (self.n_rows, *spec.shape[1:])

    def tensors(self) -> dict[str, Array]:
        """What was collected, in execution order, rows of all micro-batches together."""
        order = [step.name for step in self.steps if step.name in self._parts]
        return {name: np.concatenate(self._parts[name]) for name in order}


def states_of(context: Context, wanted: Callable[[str], bool]) -> dict[str, Array]:
    """Recurrent states of sequence 0: ``conv_state`` and ``s_state`` of each layer. Waits for the stream."""
    found = {}
    for layer, views in context.state_rows(0).items():
        for state, view in zip(STATES, views, strict=True):
            name = f"{state}-{layer}"
            if wanted(name):
                found[name] = np.empty(view.shape, view.dtype)
                context.stream.copy_out(found[name], view)
    context.stream.synchronize()
    return found
