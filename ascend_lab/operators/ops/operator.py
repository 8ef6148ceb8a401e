"""The record of an operator: formula, tensor expression, rules of types, shapes and slices.

For example, the record of relu has the NumPy formula max(x, 0), the tensor expression that
schedules are made of, its number formats, its gradient and the examples that test it. `OPERATORS`
has all records by name.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ascend_lab.errors import AscendLabError, InputError, ShapeError, TypeMismatchError
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.machine.isa import Kernel, Launch, as_kernel
from ascend_lab.machine.layout import AddressMap, pack, unpack
from ascend_lab.operators.ops import formats as forms
from ascend_lab.operators.ops.formats import (
    Attrs,
    Shape,
    Shapes,
    Tolerances,
    TypeRule,
    Values,
)
from ascend_lab.operators.ops.slicing import SliceRules, elementwise_rules
from ascend_lab.plugins import listed

Memory = Mapping[str, Values]


@dataclass(frozen=True, slots=True)
class Call:
    """One use of an operator: input shapes, formats and attributes, and the output shapes."""

    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    attrs: Mapping[str, Any]
    outputs: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class Template:
    """A hand-written kernel: the function that builds it, and the layouts of its tensors.

    `reads` are the kernel's names of the operator's inputs, in order; by default x0, x1, ... Inputs
    are stored in `layout`, outputs (y, or y0, y1, ...) in `result`, where "" means row-major and
    "NC1HWC0:16" means blocks of 16 channels in any number format. `extra(call)` returns small
    constant tensors that the kernel reads besides its inputs. `feed` and `fetch` replace these
    rules if they are given. If `applies` returns False, the operator's tensor expression is
    scheduled instead.

    In a network, separate conversion operators bring operands into these layouts. Therefore `run`
    packs and unpacks on the host, and `time` does not count it.
    """

    build: Callable[[Call, Chip], Kernel | Launch]
    reads: tuple[str, ...] = ("x",)
    layout: str = ""
    result: str = ""
    extra: Callable[[Call], dict[str, Values]] = lambda call: {}
    applies: Callable[[Call, Chip], bool] = lambda call, chip: True
    feed: Callable[[Call, Sequence[Values]], dict[str, Values]] | None = None
    fetch: Callable[[Call, Memory], tuple[Values, ...]] | None = None

    def kernel(self, call: Call, chip: Chip) -> Kernel:
        """Return the kernel of a call."""
        return as_kernel(self.build(call, chip))

    def names(self, count: int) -> tuple[str, ...]:
        """Return the kernel's names of `count` inputs."""
        return self.reads[:count] or tuple(f"x{i}" for i in range(count))

    def tensors(self, call: Call, arrays: Sequence[Values]) -> dict[str, Values]:
        """Return the kernel's tensors for input arrays."""
        if self.feed is not None:
            return self.feed(call, arrays)
        # (1, 3, 8, 8) in NC1HWC0 is packed as (1, 1, 8, 8, 16): 13 of 16 lanes are zeros.
        packed = [pack(_map(self.layout, a, a.shape), a) if self.layout else a for a in arrays]
        return {**dict(zip(self.names(len(arrays)), packed, strict=True)), **self.extra(call)}

    def outputs(self, call: Call, memory: Memory) -> tuple[Values, ...]:
        """Return the outputs from the kernel's tensors."""
        if self.fetch is not None:
            return self.fetch(call, memory)
        shapes = call.outputs
        # one output is called y, several are called y0, y1, ...
        names = ("y",) if "y" in memory else tuple(f"y{i}" for i in range(len(shapes)))
        flat_outputs = [memory[name].reshape(-1) for name in names]
        if self.result:
            pairs = zip(flat_outputs, shapes, strict=True)
            return tuple(unpack(_map(self.result, a, shape), a) for a, shape in pairs)
        return tuple(a.reshape(shape) for a, shape in zip(flat_outputs, shapes, strict=True))


def _map(layout: str, array: Values, shape: Shape) -> AddressMap:
    return forms.map_of(layout, shape, forms.format_of(array))


Grads = Sequence[Any]
"""One gradient, or None, for each input of an operator."""
TRAITS = {
    "lanes": "works lane by lane on tensors in blocks, and makes a finite number of a zero",
    "pointwise": "one tensor, element by element: does not see where elements lie",
    "bytes": "on bytes, which lie in blocks of 32 channels on a chip, not of 16 as floats do",
    "commutes": "f(x, y) = f(y, x)",
    "broadcasts": "arithmetic of two tensors that are stretched to a common shape",
    "nonnegative": "results are never below 0",
    "even": "f(-x) = f(x)",
    "moves": "puts elements elsewhere and computes nothing",
    "renames": "a view: the elements stay where they are",
    "reduction": "each result depends on a whole axis",
    "product": "a product of matrices on the cube",
    "convolution": "a sliding window with weights on the cube",
    "pooling": "the largest or the mean of sliding windows",
    "largest": "the largest of sliding windows",
    "pool gradient": "the gradient of a pooling with respect to its image",
    "channel sums": "sums over images and pixels, one per channel",
    "image fold": "folds the pixels of each channel of an image",
    "in place": "its kernel changes an input",
    "frames": "makes images of raw bytes on their way into the core: no kernel, no launch",
    "busy": "takes at least one vector operation per result, fused or not",
}
"""Trait of an operator -> its meaning."""
REQUIRED = object()
"""The default of an attribute that the caller must give."""


@dataclass(frozen=True, slots=True)
class Example:
    """Input shapes and attributes with which an operator is tested."""

    shapes: tuple[Shape, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Domain:
    """The values that a test draws for an input: uniform in [low, high).

    With `distinct` no number occurs twice. With `step` all numbers are its multiples, so that many
    are equal.
    """

    low: float = -2.0
    high: float = 2.0
    distinct: bool = False
    step: float = 0.0


# Compared and hashed by identity: fields are mappings, which have no hash.
@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """An operator: its formula, expression and rules; methods check arguments and fill defaults.

    An operator needs a `name`, `inputs`, the NumPy `formula` on fp64 or int64 arrays and, if it is
    to run on a chip, the tensor expression `compute`. All other fields default to the rules of an
    elementwise operator.

    `shape_rule(*shapes, **attrs)` returns the output shape, or a tuple of shapes.
    `slicing(shapes, **attrs)` returns the slice rules.
    `backward(site)` returns the gradients (see `ops.gradients`), computed in fp32 if `wide`.
    `template` is a hand-written kernel that replaces the default schedule.
    `traits` are properties for compiler passes (see `TRAITS`).
    `weights` are the positions of the inputs that training changes.
    `index_bounds` maps each input of indices to a function that returns the first invalid index.
    `ranges` maps an attribute that is one number to its smallest and largest value; without an
    entry any finite number is allowed.
    """

    name: str
    inputs: tuple[str, ...]
    formula: Callable[..., Any]
    compute: Callable[..., Any] | None = None
    summary: str = ""
    outputs: tuple[str, ...] = ("y",)
    attrs: Mapping[str, Any] = field(default_factory=dict)
    ranges: Mapping[str, forms.Range] = field(default_factory=dict)
    optional: int = 0
    variadic: bool = False
    shape_rule: Callable[..., Any] = lambda *shapes, **attrs: forms.broadcast_shape(
        "operands", *shapes
    )
    types: TypeRule = field(default_factory=TypeRule)
    slicing: Callable[..., SliceRules] | None = None
    backward: Callable[[Any], Grads] | None = None
    wide: bool = False
    template: Template | None = None
    traits: tuple[str, ...] = ()
    weights: tuple[int, ...] = ()
    domains: Mapping[str, Domain] = field(default_factory=dict)
    index_bounds: Mapping[str, Callable[..., int]] = field(default_factory=dict)
    examples: tuple[Example, ...] = ()
    tolerances: Tolerances | None = None
    allows_empty: bool = False

    def __repr__(self) -> str:
        """Return the signature."""
        return f"Operator({self.name}({', '.join(self.inputs)}) -> {', '.join(self.outputs)})"

    # -- arguments ------------------------------------------------------------------------------
    def names(self, count: int) -> tuple[str, ...]:
        """Return one name per input; raise `InputError` for a wrong number of inputs."""
        input_count = len(self.inputs)
        if self.variadic and count > input_count:
            # concat of 3: x, x1, x2.
            return (*self.inputs, *(f"{self.inputs[-1]}{i}" for i in range(input_count, count)))
        # conv2d (x, weight, bias) with one optional input takes 2 or 3.
        if not input_count - self.optional <= count <= input_count:
            smallest_count = f"{input_count - self.optional} to " if self.optional else ""
            or_more = " or more" if self.variadic else ""
            names = ", ".join(self.inputs)
            needed = f"{self.name}: {smallest_count}{input_count}{or_more} inputs ({names})"
            raise InputError(needed, str(count), "pass every tensor, attributes by name")
        return self.inputs[:count]

    @property
    def needs(self) -> tuple[str, ...]:
        """The attributes that the caller must give."""
        return tuple(key for key, value in self.attrs.items() if value is REQUIRED)

    def settings(self, attrs: Attrs) -> dict[str, Any]:
        """Return all attributes with defaults; raise `InputError` for wrong or missing ones."""
        for key, value in attrs.items():
            if key not in self.attrs:
                close_names = difflib.get_close_matches(key, self.attrs, 1)
                needed = f"{self.name}: attributes {', '.join(self.attrs) or '(none)'}"
                remedy = f"did you mean {close_names[0]}?" if close_names else "drop it"
                raise InputError(needed, key, remedy)
            location = f"{self.name}: attribute {key}"
            forms.check_attribute(location, value, self.attrs[key], self.ranges.get(key))
        all_attrs = {**self.attrs, **attrs}
        for key, value in all_attrs.items():
            if value is REQUIRED:
                raise InputError(f"{self.name}: attribute {key}", "none", f"give {key}=...")
        return all_attrs

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Put the operator's name in front of the error message of a rule."""
        try:
            yield
        except AscendLabError as error:
            if error.needed.startswith(f"{self.name}:"):
                raise  # a nested call has put the name there already
            needed_by = f"{self.name}: {error.needed}"
            raise type(error)(needed_by, error.got, error.remedy) from None
        except (TypeError, ValueError, IndexError, OverflowError) as error:
            attribute_kinds = (
                f"{n}={'...' if v is REQUIRED else v}" for n, v in self.attrs.items()
            )
            needed = (
                f"{self.name}: attributes of the kind of {', '.join(attribute_kinds) or '(none)'}"
            )
            raise InputError(needed, f"values that say: {error}", "correct their kind") from error

    # -- what the operator means ----------------------------------------------------------------
    def infer(self, *shapes: Shape, **attrs: Any) -> tuple[Shape, ...]:
        """Return the output shapes; raise `ShapeError` for inputs that do not fit together."""
        names = self.names(len(shapes))
        checked_shapes = [
            forms.check_shape(f"{self.name}: {n}", s) for n, s in zip(names, shapes, strict=True)
        ]
        settings = self.settings(attrs)
        empty_shapes = [s for s in checked_shapes if forms.elements(s) == 0]
        if empty_shapes and not self.allows_empty:
            remedy = "give sizes of at least 1"
            raise ShapeError(
                f"{self.name}: tensors that are not empty", str(empty_shapes[0]), remedy
            )
        # a rule returns one shape, such as (3, 4), or a tuple of shapes, such as ((3, 4), (3,))
        with self._named():
            output_shapes = self.shape_rule(*checked_shapes, **settings)
        is_tuple_of_shapes = bool(output_shapes) and isinstance(output_shapes[0], tuple)
        shape_list = output_shapes if is_tuple_of_shapes else (output_shapes,)
        return tuple(forms.check_shape(f"{self.name}: output", shape) for shape in shape_list)

    def dtypes(self, *dtypes: str, **attrs: Any) -> tuple[str, ...]:
        """Return the output formats; raise `TypeMismatchError` naming the wrong input."""
        settings = self.settings(attrs)
        with self._named():
            main = forms.check_types(
                self.name, self.types, self.names(len(dtypes)), dtypes, settings
            )
            return self.types.outputs(main, settings, len(self.outputs))

    def input_types(self, count: int, main: str, **attrs: Any) -> tuple[str, ...]:
        """Return the formats of `count` inputs when the operator's main format is `main`."""
        return self.types.inputs(self.names(count), main, self.settings(attrs))

    def reference(self, *arrays: Values, **attrs: Any) -> Any:
        """Return the output array (a tuple of several), computed in fp64 or int64 and cast once.

        The cast at the end is the only rounding. Gradient tests pass fp64 inputs and receive fp64
        outputs. Raises the errors of `infer`, `dtypes` and `check_indices`.
        """
        settings = self.settings(attrs)
        input_arrays = [np.asarray(a) for a in arrays]
        self.infer(*(a.shape for a in input_arrays), **attrs)
        self.check_indices(input_arrays, settings)
        formats = tuple(forms.format_of(a) for a in input_arrays)
        # fp64 is no format of a chip: gradient tests use it, and nothing is rounded
        output_dtypes = None if "fp64" in formats else self.dtypes(*formats, **attrs)
        with np.errstate(all="ignore"):
            wide_results = self.formula(*(forms.widen(a) for a in input_arrays), **settings)
        result_list = wide_results if isinstance(wide_results, tuple) else (wide_results,)
        results = tuple(np.asarray(values) for values in result_list)
        if output_dtypes is not None:
            # split has one declared format for all of its pieces.
            output_formats = output_dtypes
            if len(output_dtypes) != len(result_list):
                output_formats = output_dtypes[:1] * len(result_list)
            results = tuple(map(forms.round_to, results, output_formats))
        return results if len(results) > 1 else results[0]

    def expression(self, *tensors: Any, **attrs: Any) -> Any:
        """Return the operator on DSL tensors: one tensor or a tuple."""
        if self.compute is None:
            raise InputError(f"{self.name}: a tensor expression", "none", "set compute=")
        return self.compute(*tensors, **self.settings(attrs))

    def slice_rules(self, shapes: Shapes, attrs: Attrs | None = None) -> SliceRules:
        """Return the rules for splitting the output at these input shapes."""
        outs = self.infer(*shapes, **(attrs or {}))
        if self.slicing is None:
            return elementwise_rules(shapes, outs[0], outputs=len(outs))
        return self.slicing(tuple(shapes), **self.settings(attrs or {}))

    def has(self, *traits: str) -> bool:
        """Return whether the operator has at least one of some traits."""
        return any(trait in self.traits for trait in traits)

    # -- checks and tests -----------------------------------------------------------------------
    def check(self, shapes: Shapes, dtypes: Sequence[str], attrs: Attrs, chip: Chip) -> None:
        """Raise a typed error for wrong inputs, attributes, shapes or formats, or a wrong chip."""
        if not isinstance(chip, Chip):
            raise InputError(f"{self.name}: a chip", repr(chip), "pass load_chip(its name)")
        if isinstance(dtypes, str):  # a text would count as its letters
            needed = f"{self.name}: a list of number formats"
            raise InputError(needed, repr(dtypes), f"write [{dtypes!r}]")
        self.names(len(shapes))
        if len(shapes) != len(dtypes):
            needed = f"{self.name}: a number format for each of {len(shapes)} inputs"
            raise InputError(needed, str(len(dtypes)), "pass as many dtypes as shapes")
        # before the operator's own rules, which would say less about a misspelt format
        for dtype in set(dtypes) - DTYPE_BYTES.keys():
            format_names = ", ".join(DTYPE_BYTES)
            raise TypeMismatchError(f"{self.name}: one of {format_names}", str(dtype), "cast it")
        self.dtypes(*dtypes, **attrs)
        main = self.types.main(self.names(len(dtypes)), tuple(dtypes))
        forms.check_chip(self.name, self.types, main, chip)
        self.infer(*shapes, **attrs)

    def call(self, shapes: Shapes, dtypes: Sequence[str], attrs: Attrs) -> Call:
        """Return shapes, formats, all attributes and output shapes as one record."""
        outs = self.infer(*shapes, **attrs)
        return Call(tuple(shapes), tuple(dtypes), self.settings(attrs), outs)

    def templates(self) -> list[Template]:
        """Return the operator's templates, those of special kernels first.

        These come from the lists TEMPLATES of `ascend_lab.fused`, pairs of a name and a template.
        """
        # the first that applies is taken, so that a special kernel goes before the operator's own
        special = [template for name, template in listed("TEMPLATES") if name == self.name]
        return special if self.template is None else [*special, self.template]

    def template_for(self, call: Call, chip: Chip) -> Template | None:
        """Return the first template that applies to a call on a chip, or None."""
        return next((t for t in self.templates() if t.applies(call, chip)), None)

    def index_limits(self, shapes: Shapes, attrs: Attrs) -> dict[int, int]:
        """Return, for each input of indices, the first index that is too large."""
        names = self.names(len(shapes))
        settings = self.settings(attrs)
        index_inputs = [(i, name) for i, name in enumerate(names) if name in self.index_bounds]
        return {i: self.index_bounds[name](*shapes, **settings) for i, name in index_inputs}

    def check_indices(self, arrays: Sequence[Values], attrs: Attrs) -> None:
        """Raise `InputError` naming the first index outside its tensor."""
        for i, limit in self.index_limits([a.shape for a in arrays], attrs).items():
            # A table of 10 rows: 0 .. 9, with from_end -10 .. 9.
            first_index = -limit if attrs.get("from_end") else 0
            bad_positions = np.argwhere((arrays[i] < first_index) | (arrays[i] >= limit))
            if len(bad_positions):
                position = tuple(int(n) for n in bad_positions[0])
                needed = (
                    f"{self.name}: {self.names(len(arrays))[i]} from {first_index} to {limit - 1}"
                )
                remedy = "check them first"
                if not first_index:
                    remedy = f"the hardware does not wrap negative indices; {remedy}"
                raise InputError(needed, f"{arrays[i][position]} at {position}", remedy)


OPERATORS: dict[str, Operator] = {}
"""All operators by name, in the order of registration."""


def register(operator: Operator, *, replace: bool = False) -> Operator:
    """Add an operator and return it; raise `InputError` if the name is taken, unless `replace`."""
    if operator.name in OPERATORS and not replace:
        remedy = "rename it, or pass replace=True"
        raise InputError("an operator name that is free", operator.name, remedy)
    # a misspelt trait would switch off a pass without a word
    unknown = set(operator.traits) - TRAITS.keys()
    if unknown:
        needed = f"{operator.name}: traits of {', '.join(TRAITS)}"
        raise InputError(needed, ", ".join(sorted(unknown)), "correct it")
    OPERATORS[operator.name] = operator
    return operator


def get(name: str) -> Operator:
    """Return an operator by name; raise `InputError` with similar names."""
    if name in OPERATORS:
        return OPERATORS[name]
    # "softmx" is near to softmax and log_softmax.
    close_names = difflib.get_close_matches(name, OPERATORS, 3, 0.5)
    all_names = ", ".join(sorted(OPERATORS))
    remedy = (
        f"did you mean {' or '.join(close_names)}?" if close_names else f"give one of {all_names}"
    )
    raise InputError(f"one of {len(OPERATORS)} operators", repr(name), remedy)


def define(*arguments: Any, **fields: Any) -> Operator:
    """Register an operator of these fields and return it."""
    return register(Operator(*arguments, **fields))


def resolve(operator: Operator | str) -> Operator:
    """Return an operator that is given itself or by its name."""
    return get(operator) if isinstance(operator, str) else operator
