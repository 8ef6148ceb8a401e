"""Calls operators as functions, without a graph: `y = op.matmul(a, b)`.

The first call with some shapes, formats and attributes compiles the operator as a graph of one
node. Later calls find it in a cache that drops the least recently used operator, like AscendCL's
operator queue. Between `acl.init` and `acl.finalize` the kernels run in a stream of the device,
otherwise on a chip that the caller names. With `stream` the result is filled with poison (bytes of
ones) until the stream has carried out the operator.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ascend_lab.compiler import GraphBuilder, compile_graph, draft, simulate_graph
from ascend_lab.compiler.ir import Values, operator_of
from ascend_lab.compiler.tasks import Compiled
from ascend_lab.compiler.values import run_tasks
from ascend_lab.deploy.runtime.process import POISON, PROCESSES, Stream, process
from ascend_lab.deploy.runtime.streams import AclError, Code, need
from ascend_lab.deploy.runtime.writer import engine_rows
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.operators.ops.formats import format_of, numpy_type

DEFAULT_CHIP = "Ascend310"
"""The chip of calls before `acl.init` or after `acl.finalize`."""
MAX_QUEUE_LENGTH = 2**16


@dataclass
class Cache:
    """A cache of compiled operators, least recently used first, with statistics of its use."""

    limit: int = 1024
    hits: int = 0
    misses: int = 0
    compile_s: float = 0.0
    entries: OrderedDict[Any, tuple[Compiled, list[list[Any]]]] = field(default_factory=OrderedDict)

    @property
    def size(self) -> int:
        """Return the number of operators in the cache, at most `limit`."""
        return len(self.entries)

    def get(
        self, key: Any, compile_operator: Callable[[], Compiled]
    ) -> tuple[Compiled, list[list[Any]]]:
        """Return the entry of a key; compile it if there is none."""
        if key in self.entries:
            self.hits += 1
            self.entries.move_to_end(key)
            return self.entries[key]
        self.misses += 1
        start_s = time.perf_counter()
        compiled = compile_operator()
        self.entries[key] = compiled, engine_rows(simulate_graph(compiled))
        self.compile_s += time.perf_counter() - start_s
        self.trim()
        return self.entries[key]

    def trim(self) -> None:
        """Drop the least recently used operators above the limit."""
        while len(self.entries) > self.limit:
            self.entries.popitem(last=False)


_CACHE = Cache()


def cache_info() -> Cache:
    """Return a copy of the cache of compiled operators, with its counts since `clear_cache`."""
    return replace(_CACHE, entries=_CACHE.entries.copy())


def clear_cache() -> None:
    """Delete all compiled operators and reset the counts."""
    _CACHE.__init__(_CACHE.limit)  # type: ignore[misc]


def set_max_op_queue_num(limit: int) -> None:
    """Limit the number of compiled operators; raises `AclError` 148048 for one out of range."""
    is_in_range = isinstance(limit, int) and 1 <= limit <= MAX_QUEUE_LENGTH
    need(is_in_range, f"from 1 to {MAX_QUEUE_LENGTH} operators", repr(limit), code=Code.QUEUE)
    _CACHE.limit = limit
    _CACHE.trim()


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the function of an operator; raises `AclError` 100024 for an unknown one."""
    # Python looks up names such as __path__ in every module.
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        operator_of(name)
    except InputError as error:
        raise AclError(Code.NO_OPERATOR, error.needed, error.got, error.remedy) from None
    return partial(call, name)


def call(
    name: str, *arrays: Values, stream: Stream | None = None, chip: Chip | str = "", **attrs: Any
) -> Any:
    """Return the output of an operator, a tuple if it has several.

    `chip` can be given only before `acl.init`, `stream` only after it. Operands are read when the
    stream reaches the operator, so that the result of one call can be an operand of the next.
    Raises the errors of the operator, and those of `compile_graph` if the chip has no kernel.
    """
    operands = [np.asarray(array) for array in arrays]
    if PROCESSES and not chip:
        chip = process().device().chip
    elif PROCESSES or stream is not None:
        raise InputError("a chip outside acl.init, or a stream inside", "both", "drop one")
    chip = load_chip(chip or DEFAULT_CHIP) if isinstance(chip, str) else chip
    operand_types = tuple((array.shape, format_of(array)) for array in operands)
    # Attributes with default values are left out: axis=1 and no axis may be the same operator.
    key = name, operand_types, repr(sorted(draft.given_attrs(name, attrs).items())), chip
    compiled, rows = _CACHE.get(key, lambda: _compile(name, operand_types, attrs, chip))
    # The results are returned at once and filled when the stream has carried out the operator.
    results = _unfilled_results(compiled)
    operand_copies: list[Values] = []

    def copy_operands() -> None:
        """Copy the operands."""
        # Operands are read at the start, when an earlier operator may have filled them.
        operand_copies.extend(map(np.copy, operands))

    def compute() -> None:
        """Compute the operator, and write its results."""
        values = run_tasks(compiled, dict(zip(compiled.graph.inputs, operand_copies, strict=True)))
        for result, value in zip(results, compiled.graph.outputs, strict=True):
            result[...] = values[value]

    if not PROCESSES:
        copy_operands()
        compute()
    else:
        proc = process(waits=stream is None)
        target_stream = proc.stream(stream)
        proc.issue_tasks(target_stream, rows, copy_operands, compute)
        if stream is None:
            proc.clock.drain(target_stream)
    return results if len(results) > 1 else results[0]


def _unfilled_results(compiled: Compiled) -> tuple[Values, ...]:
    """Return arrays for the outputs of an operator, whose bytes are those of NaN."""
    types = [compiled.graph.types[value] for value in compiled.graph.outputs]
    results = tuple(np.empty(kind.shape, numpy_type(kind.dtype)) for kind in types)
    for result in results:
        result.reshape(-1).view(np.uint8)[:] = POISON
    return results


def _compile(name: str, operand_types: Sequence[Any], attrs: Any, chip: Any) -> Compiled:
    """Return a compiled graph whose one node is the operator, on inputs of some formats."""
    net = GraphBuilder(name)
    inputs = [net.input(f"x{i}", shape, dtype) for i, (shape, dtype) in enumerate(operand_types)]
    outputs = net.add_node(name, *inputs, **attrs)
    net.output(*(outputs if isinstance(outputs, tuple) else (outputs,)))
    # dtype "" keeps the formats of the caller's arrays.
    return compile_graph(net.build(), chip, dtype="")
