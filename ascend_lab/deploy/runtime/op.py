"""Mixed programming: operators of the library called as functions, outside any graph.

    y = op.matmul(a, b)

The first call for some shapes, formats and attributes compiles the operator as a graph of one node;
later ones find it in a cache that forgets what was not used for longest, as AscendCL's queue of
operators does. Between `acl.init` and `acl.finalize` the kernels run in a stream of the device;
without them on a chip of its own. With `stream` the result is poison until that is synchronised.
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
from ascend_lab.deploy.runtime.container import engine_rows
from ascend_lab.deploy.runtime.process import POISON, PROCESSES, Stream, process
from ascend_lab.deploy.runtime.streams import AclError, Code, need
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.operators.ops.formats import format_of, numpy_type

ALONE = "Ascend310"
"""The chip of calls outside `acl.init` and `acl.finalize`."""
LARGEST_QUEUE = 2**16


@dataclass
class Cache:
    """How often an operator was found compiled, how often not, seconds spent, and what is kept."""

    limit: int = 1024
    hits: int = 0
    misses: int = 0
    compile_s: float = 0.0
    found: OrderedDict[Any, tuple[Compiled, list[list[Any]]]] = field(default_factory=OrderedDict)

    @property
    def kept(self) -> int:
        """How many operators are kept, at most `limit`."""
        return len(self.found)

    def get(self, key: Any, make: Callable[[], Compiled]) -> tuple[Compiled, list[list[Any]]]:
        """Return what is kept under a key, or make it; the longest unused goes."""
        if key in self.found:
            self.hits += 1
            self.found.move_to_end(key)
            return self.found[key]
        self.misses += 1
        start = time.perf_counter()
        made = make()
        self.found[key] = made, engine_rows(simulate_graph(made))
        self.compile_s += time.perf_counter() - start
        self.trim()
        return self.found[key]

    def trim(self) -> None:
        """Forget the longest unused."""
        while len(self.found) > self.limit:
            self.found.popitem(last=False)


_CACHE = Cache()


def cache_info() -> Cache:
    """Return what the cache of compiled operators did since `clear_cache`."""
    return replace(_CACHE, found=_CACHE.found.copy())


def clear_cache() -> None:
    """Forget all compiled operators and the counts."""
    _CACHE.__init__(_CACHE.limit)  # type: ignore[misc]


def set_max_op_queue_num(limit: int) -> None:
    """Keep at most so many compiled operators; `AclError` 148048 for a limit out of range."""
    fine = isinstance(limit, int) and 1 <= limit <= LARGEST_QUEUE
    need(fine, f"from 1 to {LARGEST_QUEUE} operators", repr(limit), code=Code.QUEUE)
    _CACHE.limit = limit
    _CACHE.trim()


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the function of an operator; `AclError` 100024 for an unknown one."""
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
    """Return the output of an operator, a tuple of several; `chip` counts outside a process only.

    Operands are read when the stream gets there: results of one call may go into the next.
    Raises as the operator, or as `compile_graph` for what no kernel computes on the chip.
    """
    given = [np.asarray(a) for a in arrays]
    if PROCESSES and not chip:
        chip = process().device().chip
    elif PROCESSES or stream is not None:
        raise InputError("a chip outside acl.init, or a stream inside", "both", "drop one")
    chip = load_chip(chip or ALONE) if isinstance(chip, str) else chip
    kinds = tuple((a.shape, format_of(a)) for a in given)
    key = name, kinds, repr(sorted(draft.given_attrs(name, attrs).items())), chip
    compiled, rows = _CACHE.get(key, lambda: _compile(name, kinds, attrs, chip))
    types = [compiled.graph.types[n] for n in compiled.graph.outputs]
    results = tuple(np.empty(t.shape, numpy_type(t.dtype)) for t in types)
    for result in results:
        result.reshape(-1).view(np.uint8)[:] = POISON
    held: list[Values] = []

    def begin() -> None:
        held.extend(map(np.copy, given))

    def compute() -> None:
        found = run_tasks(compiled, dict(zip(compiled.graph.inputs, held, strict=True)))
        for result, own in zip(results, compiled.graph.outputs, strict=True):
            result[...] = found[own]

    if not PROCESSES:
        begin()
        compute()
    else:
        found = process(waits=stream is None)
        own = found.stream(stream)
        found.work(own, rows, begin, compute)
        if stream is None:
            found.clock.drain(own)
    return results if len(results) > 1 else results[0]


def _compile(name: str, kinds: Sequence[Any], attrs: Any, chip: Any) -> Compiled:
    """Return a graph of one node, compiled as any graph is, formats left alone."""
    net = GraphBuilder(name)
    inputs = [net.input(f"x{i}", shape, dtype) for i, (shape, dtype) in enumerate(kinds)]
    found = net.add_node(name, *inputs, **attrs)
    net.output(*(found if isinstance(found, tuple) else (found,)))
    return compile_graph(net.build(), chip, dtype="")
