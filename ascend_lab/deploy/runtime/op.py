"""Operators called as functions, outside any graph ("mixed programming"):

    y = op.matmul(a, b)

The first call for some shapes, formats and attributes compiles the operator as a graph of one node.
Later calls find it in a cache that drops the least recently used operator, as AscendCL's queue of
operators does. Between `acl.init` and `acl.finalize` the kernels run in a stream of the device,
else on a chip that the call names. With `stream` the result is poison until it is synchronised.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ascend_lab.compiler import (
    Compiled,
    GraphBuilder,
    compile_graph,
    draft,
    run_tasks,
    simulate_graph,
)
from ascend_lab.compiler.ir import Values, operator_of
from ascend_lab.deploy.runtime.process import POISON, PROCESSES, Stream, process
from ascend_lab.deploy.runtime.streams import AclError, Code, need
from ascend_lab.deploy.runtime.writer import engine_rows
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.operators.ops.formats import format_of, numpy_type

ALONE = "Ascend310"
"""The chip of calls outside `acl.init` and `acl.finalize`."""
LARGEST_QUEUE = 2**16


@dataclass
class Cache:
    """Compiled operators, least recently used first, how often a call found one, and seconds."""

    limit: int = 1024
    hits: int = 0
    misses: int = 0
    compile_s: float = 0.0
    entries: OrderedDict[Any, tuple[Compiled, list[list[Any]]]] = field(default_factory=OrderedDict)

    @property
    def kept(self) -> int:
        """How many operators the cache holds, at most `limit`."""
        return len(self.entries)

    def get(self, key: Any, make: Callable[[], Compiled]) -> tuple[Compiled, list[list[Any]]]:
        """Return the entry of a key; make it if there is none, and drop the least recently used."""
        if key in self.entries:
            self.hits += 1
            self.entries.move_to_end(key)
            return self.entries[key]
        self.misses += 1
        start_s = time.perf_counter()
        compiled = make()
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
    """Return the cache of compiled operators as it is now, with its counts since `clear_cache`."""
    # a copy: the caller's numbers stay as they are when later calls count on
    return replace(_CACHE, entries=_CACHE.entries.copy())


def clear_cache() -> None:
    """Forget all compiled operators and the counts."""
    _CACHE.__init__(_CACHE.limit)  # type: ignore[misc]


def set_max_op_queue_num(limit: int) -> None:
    """Keep at most so many compiled operators; `AclError` 148048 for a limit out of range."""
    is_in_range = isinstance(limit, int) and 1 <= limit <= LARGEST_QUEUE
    need(is_in_range, f"from 1 to {LARGEST_QUEUE} operators", repr(limit), code=Code.QUEUE)
    _CACHE.limit = limit
    _CACHE.trim()


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the function of an operator; `AclError` 100024 for an unknown one."""
    # Python asks a module for __path__ and the like: these are no operators
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

    `chip` is allowed outside `acl.init` and `acl.finalize` only, `stream` inside only. Operands are
    read when the stream reaches the operator: the results of one call may go into the next.
    Raises as the operator, or as `compile_graph` for what no kernel computes on the chip.
    """
    operands = [np.asarray(array) for array in arrays]
    if PROCESSES and not chip:
        chip = process().device().chip
    elif PROCESSES or stream is not None:
        raise InputError("a chip outside acl.init, or a stream inside", "both", "drop one")
    chip = load_chip(chip or ALONE) if isinstance(chip, str) else chip
    kinds = tuple((array.shape, format_of(array)) for array in operands)
    # attributes equal to their defaults are left out: axis=1 and no axis may be one entry
    key = name, kinds, repr(sorted(draft.given_attrs(name, attrs).items())), chip
    compiled, rows = _CACHE.get(key, lambda: _compile(name, kinds, attrs, chip))
    types = [compiled.graph.types[value] for value in compiled.graph.outputs]
    # returned at once, and filled when the stream has carried out the operator
    results = tuple(np.empty(kind.shape, numpy_type(kind.dtype)) for kind in types)
    for result in results:
        result.reshape(-1).view(np.uint8)[:] = POISON
    copies: list[Values] = []

    def begin() -> None:
        # operands are read at the start: an earlier operator may have filled them by then
        copies.extend(map(np.copy, operands))

    def compute() -> None:
        values = run_tasks(compiled, dict(zip(compiled.graph.inputs, copies, strict=True)))
        for result, value in zip(results, compiled.graph.outputs, strict=True):
            result[...] = values[value]

    if not PROCESSES:
        begin()
        compute()
    else:
        proc = process(waits=stream is None)
        issued_to = proc.stream(stream)
        proc.work(issued_to, rows, begin, compute)
        if stream is None:
            proc.clock.drain(issued_to)
    return results if len(results) > 1 else results[0]


def _compile(name: str, kinds: Sequence[Any], attrs: Any, chip: Any) -> Compiled:
    """Return a compiled graph whose one node is the operator, on inputs of some formats."""
    net = GraphBuilder(name)
    inputs = [net.input(f"x{i}", shape, dtype) for i, (shape, dtype) in enumerate(kinds)]
    outputs = net.add_node(name, *inputs, **attrs)
    net.output(*(outputs if isinstance(outputs, tuple) else (outputs,)))
    # dtype "": the formats of the caller's arrays stay as they are
    return compile_graph(net.build(), chip, dtype="")
