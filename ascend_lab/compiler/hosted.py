"""Runs ONNX models that do not fit into one graph: nodes without a kernel run on AI CPU or host.

    model -> values on the host -> sizes of every tensor -> seconds of every node on every engine
          -> parts by the published rule -> seconds of each node on the core, inside its part
          -> placement of least time -> parts: graphs for the core, nodes for others, copies between

A node that the importer or the compiler refuses is computed by ONNX Runtime or by the reference
evaluator of ONNX, whichever `witnesses` says is correct. Sizes that depend on values (the result of
NonZero) are those for the given inputs: other inputs may lead to another placement. The AI CPU runs
operators on tensors of numbers; strings, sequences and branches run on the host. The model's inputs
and outputs are on the device, as for other networks; constants are on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ascend_lab.compiler import engines
from ascend_lab.compiler.compile import DTYPES, compile_graph
from ascend_lab.compiler.engines import CORE, CPU, HOST, MEDIA, TRUST, Placement, Problem, Work
from ascend_lab.compiler.evaluate import evaluate
from ascend_lab.compiler.network import NetworkTimeline, OperatorTime, simulate_graph
from ascend_lab.compiler.onnx import Imported, host as h, import_pinning
from ascend_lab.compiler.onnx.tensors import NUMPY, beyond_32_bits, inputs_of
from ascend_lab.compiler.tasks import CpuTimeline
from ascend_lab.errors import AscendLabError, InputError, UnsupportedError
from ascend_lab.machine.chip import Chip

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

    from ascend_lab.compiler.tasks import Compiled

COPY = "copy"
INPUTS = "graph inputs"
OUTPUTS = "graph outputs"


@dataclass(frozen=True, slots=True)
class Part:
    """Nodes that run one after another: a graph compiled for the core, or nodes elsewhere."""

    nodes: tuple[NodeProto, ...]
    imported: Imported | None
    compiled: Compiled | None


@dataclass(frozen=True, slots=True)
class Hosted:
    """A placed model; `reasons` says, by its title, why a node does not run on the core."""

    name: str
    chip: Chip
    model: ModelProto
    parts: tuple[Part, ...]
    problem: Problem
    placement: Placement
    reasons: Mapping[str, str]
    values: Mapping[str, Any]
    """The values of all tensors for the given inputs, computed on the host."""

    @property
    def tensors_read_outside(self) -> list[str]:
        """Return the tensors that other parts may read, and the outputs of the model."""
        outputs = [entry.name for entry in self.model.graph.output]
        return [*outputs, *(name for work in self.problem.works for name in work.reads)]

    @property
    def off_core(self) -> dict[str, str]:
        """Return the nodes on the AI CPU or the host, and the engine of each."""
        return {n: engine for n, engine in self.placement.engines.items() if engine != CORE}

    def run(self) -> dict[str, h.Values]:
        """Return the outputs, with the core's parts evaluated as graphs, the rest on the host."""
        # leave out the values that placing computed: each part has to write its results itself
        nodes = [node for part in self.parts for node in part.nodes]
        later = {name for node in nodes for name in node.output}
        values = {name: value for name, value in self.values.items() if name not in later}
        for part in self.parts:
            values |= self._values(part, values)
        return {entry.name: values[entry.name] for entry in self.model.graph.output}

    def _values(self, part: Part, known: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a part writes, computed from the known tensors that it reads."""
        reads, writes = h.reads_and_writes(part.nodes, self.tensors_read_outside)
        model = h.sub_model(self.model, part.nodes, reads, writes, known)
        if part.imported is not None:
            graph = part.imported.graph
            kinds = part.imported.output_types
            # if a graph cannot hold some numbers, the host computes the part
            with suppress(AscendLabError):
                results = evaluate(graph, {name: known[name] for name in graph.inputs})
                return {n: np.asarray(results[n]).astype(NUMPY[kind]) for n, kind in kinds.items()}
        return h.run_on_host(model, known)

    def timeline(self) -> NetworkTimeline:
        """Return the times of all parts and copies in order; L2 is empty before each core part."""
        operators: list[OperatorTime] = []
        # a tensor is copied when the first operator on the other side needs it
        copied: set[str] = set()
        works = {work.name: work for work in self.problem.works}
        for part in self.parts:
            for node in part.nodes:
                operators += self._copies(works[node.name], copied)
                # a part of the core is timed as one network below
                if part.compiled is None:
                    operators.append(self._node(node, works[node.name]))
            if part.compiled is not None:
                operators += simulate_graph(part.compiled).operators
        operators += self._copies(works[OUTPUTS], copied)
        return NetworkTimeline(self.name, self.chip, tuple(operators), 0)

    def summary(self) -> dict[str, Any]:
        """Return the times as a network's summary; its totals add what ran where, and why."""
        times = self.timeline()
        data = times.summary()
        rule = self.problem.cheapest_engine()
        outside = [(op, op.timeline.busy_cycles) for op in times.operators]
        for engine, key in ((MEDIA, "media"), (HOST, "host"), (COPY, "copy")):
            operators = [op for op, busy in outside if engine in busy]
            data["totals"] |= {
                f"{key}_operators": [op.name for op in operators],
                f"{key}_time_s": sum(op.time_s for op in operators),
            }
        data["placement"] = {
            "engines": self.off_core,
            "reasons": {name: self.reasons[name] for name in self.off_core if name in self.reasons},
            "copies": [name for name, _ in self.placement.copies],
            "nodes_s": self.placement.time_s,
            "cheapest_engine_s": rule.time_s,
            "trust": TRUST,
        }
        return data

    def lines(self) -> list[str]:
        """Return lines of text: what runs off the core, why, and the time by the published rule."""
        off_core = self.off_core
        title_of = {node.name: node.op_type for part in self.parts for node in part.nodes}
        off_core_lines = [
            f"{name} ({title_of[name]}) on the {engine} ({TRUST} rate): "
            f"{self.reasons.get(name, 'its neighbours are there, or a launch costs more')}"
            for name, engine in off_core.items()
        ]
        rule_us = self.problem.cheapest_engine().time_s * 1e6
        total_line = (
            f"placement: {len(off_core)} of {len(title_of)} nodes off the core, "
            f"{len(self.placement.copies)} copies, {self.placement.time_s * 1e6:.1f} us node by "
            f"node; the cheapest-engine rule {rule_us:.1f} us"
        )
        return [*off_core_lines, total_line]

    def _copies(self, work: Work, copied: set[str]) -> list[OperatorTime]:
        """Return the copies that an operator is the first to need."""
        to_host = self.placement.engines[work.name] == HOST
        new_copies = [
            t for t in work.reads if (t, to_host) in self.placement.copies and t not in copied
        ]
        copied.update(new_copies)
        kind = f"{COPY} to the {'host' if to_host else 'device'}"
        over_s = engines.COPY_OVERHEAD_S
        return [
            self._outside(
                tensor,
                kind,
                COPY,
                h.size_bytes(self.values[tensor]),
                (over_s, self.problem.copy_s[tensor] - over_s),
            )
            for tensor in new_copies
        ]

    def _node(self, node: NodeProto, work: Work) -> OperatorTime:
        engine = self.placement.engines[work.name]
        over_s = {HOST: engines.HOST_OVERHEAD_S, MEDIA: self.chip.launch_overhead_s}.get(
            engine, self.chip.ai_cpu_overhead_s
        )
        seconds = (over_s, work.seconds[engine] - over_s)
        size = h.moved_bytes(node, self.values)
        return self._outside(work.name, f"{node.op_type} on the {engine}", engine, size, seconds)

    def _outside(
        self, name: str, title: str, engine: str, size: int, seconds: tuple[float, float]
    ) -> OperatorTime:
        # the host has its own memory; on the device every byte is assumed to miss L2
        memory_bytes = 0 if engine == HOST else size
        timeline = CpuTimeline(
            name,
            self.chip,
            (),
            read_bytes=size,
            written_bytes=0,
            factor_bytes=0,
            memory_bytes=memory_bytes,
            engine=engine,
            seconds=seconds,
        )
        return OperatorTime(name, title, timeline)


def place_model(
    source: str | Path | bytes | ModelProto,
    chip: Chip,
    *,
    inputs: Mapping[str, Any] | None = None,
    dtype: str = "fp16",
    media_pixels_per_s: float = 0.0,
) -> Hosted:
    """Return any ONNX model placed on a chip and its host, for some inputs or random ones.

    `media_pixels_per_s` is the rate of a media unit, which resizes uint8 images; 0 is for chips
    without one.
    Raises `InputError` or `GraphError` if `source` is not a valid model, and `UnsupportedError` for
    a model that neither ONNX Runtime nor the reference evaluator computes.
    """
    if dtype not in DTYPES:
        raise InputError(f"a dtype among {', '.join(DTYPES)}", dtype, "choose one")
    model = h.whole_model(source)
    feed = dict(inputs or {}) or h.random_feed(model, {}, None, 0)
    if missing := [entry.name for entry in inputs_of(model.graph) if entry.name not in feed]:
        raise InputError(f"inputs with {', '.join(missing)}", ", ".join(feed), "give each by name")
    values = {**h.constants_of(model), **h.run_on_host(model, feed, everything=True), **feed}
    return _Placer(model, chip, values, dtype, media_pixels_per_s).place()


class _Placer:
    """Places a model: the seconds of each node on each engine, the minimum cut, the parts."""

    def __init__(
        self,
        model: ModelProto,
        chip: Chip,
        values: Mapping[str, Any],
        dtype: str,
        media_pixels_per_s: float,
    ) -> None:
        """Find the nodes to place: those that an output needs and that are not constant."""
        self.model = model
        self.chip = chip
        self.values = values
        self.dtype = dtype
        self.media_rate = media_pixels_per_s
        self.outputs = [entry.name for entry in model.graph.output]
        self.known = {tensor.name for tensor in model.graph.initializer}
        self.reasons: dict[str, str] = {}
        self.inputs = [entry.name for entry in inputs_of(model.graph)]
        # backward from the outputs: a node that nothing reads is not placed
        used = set(self.outputs)
        live = []
        for node in reversed(model.graph.node):
            if used.intersection(node.output):
                used.update(h.all_reads(node))
                live.append(node)
        self.nodes = []
        for node in reversed(live):
            if node.op_type == "Constant" or (
                node.input and self.known.issuperset(h.all_reads(node))
            ):
                self.known.update(node.output)
            else:
                self.nodes.append(node)

    def place(self) -> Hosted:
        """Return the placement; nodes of a part that the compiler refuses leave the core."""
        works = [
            Work(INPUTS, {CORE: 0.0}, (), tuple(self.inputs)),
            *(self._work(node) for node in self.nodes),
            Work(OUTPUTS, {CORE: 0.0}, tuple(dict.fromkeys(self.outputs)), ()),
        ]
        copy_s = {
            name: engines.copy_s(self.chip, h.size_bytes(self.values[name]))
            for work in works
            for name in work.writes
            if h.is_numbers(self.values[name])
        }
        # first the published rule, which makes parts; then the cut, with the seconds that nodes
        # take on the core inside these parts
        first = self._compiling_placement(Problem(works, copy_s), Problem.cheapest_engine)
        problem = Problem(self._works_timed_in_parts(first), copy_s)
        by_rule = replace(first, problem=problem, placement=problem.placed(first.placement.engines))
        exact = self._compiling_placement(problem, Problem.exact)
        # the cut minimises the sum of single nodes' times; as parts, the rule's may be faster
        return min(exact, by_rule, key=lambda hosted: hosted.timeline().time_s)

    def _compiling_placement(
        self, problem: Problem, choose: Callable[[Problem], Placement]
    ) -> Hosted:
        """Return a placement whose parts all compile: nodes that are refused leave the core."""
        remaining = problem
        while True:
            placement = choose(remaining)
            try:
                parts = tuple(self._part(*group) for group in self._groups(placement))
            except _RefusedError as error:
                names, reason = error.args
                self.reasons.update(dict.fromkeys(names, reason))
                # these nodes cannot run on the core; each round takes some away, so the loop ends
                remaining = _without_core(remaining, names)
                continue
            return Hosted(
                name=self.model.graph.name or "model",
                chip=self.chip,
                model=self.model,
                parts=parts,
                problem=remaining,
                placement=placement,
                reasons=self.reasons,
                values=self.values,
            )

    def _works_timed_in_parts(self, rule: Hosted) -> list[Work]:
        """Return the operators; on the core, their seconds are those of the kernels in their part.

        An operator that runs alone pays for conversions and launches that it shares in a part. A
        kernel's seconds go to the last of its nodes, those of a conversion to the node before it.
        """
        seconds_of_node: dict[str, float] = {}
        for part in rule.parts:
            names = [node.name for node in part.nodes] if part.compiled else []
            seconds_of_node.update(dict.fromkeys(names, 0.0))
            last_name = names[0] if names else ""
            for op in simulate_graph(part.compiled).operators if part.compiled else ():
                # a kernel is named after a node: `conv1_fp16` belongs to `conv1`, not to `conv`
                matching = [name for name in names if op.name.startswith(name)]
                last_name = max(matching, key=len, default=last_name)
                seconds_of_node[last_name] += op.time_s
        core_seconds = {name: {CORE: s} for name, s in seconds_of_node.items()}
        return [
            replace(work, seconds={**work.seconds, **core_seconds.get(work.name, {})})
            for work in rule.problem.works
        ]

    def _work(self, node: NodeProto) -> Work:
        """Return a node's seconds on every engine that supports it."""
        moved = h.moved_bytes(node, self.values)
        seconds = {HOST: engines.HOST_OVERHEAD_S + moved / engines.HOST_RATE_BYTES_PER_S}
        names = [name for name in (*h.all_reads(node), *node.output) if name]
        operands: list[Any] = [self.values.get(name) for name in names]
        are_numbers = all(h.is_numbers(value) for value in operands)
        has_branches = any(
            attribute.HasField("g") or attribute.graphs for attribute in node.attribute
        )
        if are_numbers and self.chip.ai_cpu_rate_bytes_per_s and not has_branches:
            rate = self.chip.ai_cpu_rate_bytes_per_s
            seconds[CPU] = self.chip.ai_cpu_overhead_s + moved / rate
        image: Any = operands[0] if operands and h.is_numbers(operands[0]) else None
        # a media unit resizes uint8 images with one or three channels
        is_picture = image is not None and image.dtype == np.uint8 and image.ndim == 4
        if node.op_type == "Resize" and self.media_rate and is_picture and image.shape[1] in (1, 3):
            pixels = max(end.shape[2] * end.shape[3] for end in (operands[0], operands[-1]))
            busy_s = len(operands[0]) * pixels / self.media_rate
            seconds[MEDIA] = self.chip.launch_overhead_s + busy_s
        try:
            for value in operands:
                kind = getattr(value, "dtype", "none or several tensors")
                if got := beyond_32_bits(value) if h.is_numbers(value) else f"{kind}":
                    needed = f"{node.name}: tensors of numbers in at most 32 bits"
                    raise UnsupportedError(needed, got)
            compiled = self._compiled((node,)).compiled
            assert compiled is not None
            seconds[CORE] = simulate_graph(compiled).time_s
        except AscendLabError as error:
            self.reasons[node.name] = str(error)
        reads = tuple(name for name in h.all_reads(node) if name not in self.known)
        return Work(node.name, seconds, reads, tuple(name for name in node.output if name))

    def _groups(self, placement: Placement) -> list[tuple[bool, list[NodeProto]]]:
        """Return the nodes in parts, alternately for the core and for other engines.

        Each node comes after those whose results it reads.
        """
        part_of: dict[str, int] = {}
        groups: dict[int, list[NodeProto]] = {}
        for node in self.nodes:
            on_core = placement.engines[node.name] == CORE
            # parts alternate: even ones are the core's, odd ones the others'. A node goes to the
            # first part of its kind that does not come before those that it reads from.
            part_index = max((part_of.get(name, 0) for name in h.all_reads(node)), default=0)
            if _is_core_part(part_index) != on_core:
                part_index += 1
            part_of.update((name, part_index) for name in node.output)
            groups.setdefault(part_index, []).append(node)
        return [(_is_core_part(index), groups[index]) for index in sorted(groups)]

    def _part(self, on_core: bool, nodes: list[NodeProto]) -> Part:
        if not on_core:
            return Part(tuple(nodes), None, None)
        try:
            return self._compiled(tuple(nodes))
        except AscendLabError as error:
            raise _RefusedError({node.name for node in nodes}, str(error)) from error

    def _compiled(self, nodes: tuple[NodeProto, ...]) -> Part:
        """Return nodes as a graph and its kernels; inputs that decide shapes are fixed."""
        ids = {id(node) for node in nodes}
        later = [n for node in self.nodes if id(node) not in ids for n in h.all_reads(node)]
        reads, writes = h.reads_and_writes(nodes, [*self.outputs, *later])
        inner = [name for name in reads if name not in self.known]
        model = h.sub_model(self.model, nodes, reads, writes, self.values, self.known)
        shapes = {name: self.values[name].shape for name in inner}
        imported = import_pinning(model, self.values, shapes=shapes)
        if shapes.keys() - imported.input_types.keys() and not imported.graph.nodes:
            needed = f"{nodes[0].name}: a result that sizes alone decide"
            raise UnsupportedError(needed, "one that values decide")
        return Part(nodes, imported, compile_graph(imported.graph, self.chip, dtype=self.dtype))


def _is_core_part(index: int) -> bool:
    return index % 2 == 0


def _without_core(problem: Problem, names: Container[str]) -> Problem:
    """Return a problem in which the operators of these names cannot run on the core."""
    works = []
    for work in problem.works:
        seconds = dict(work.seconds)
        if work.name in names:
            seconds.pop(CORE, None)
        works.append(replace(work, seconds=seconds))
    return Problem(works, problem.copy_s)


class _RefusedError(Exception):
    """A part that does not compile: the titles of its nodes, and why."""
