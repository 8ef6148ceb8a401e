"""Rewrites a graph into operators that have kernels, the last step before layouts are chosen.

gemm(a, b, c)          matmul, add
batch_norm             mul and add by constants per channel
attention              flash attention (one kernel, scores stay on the core), or products, softmax
(.., k) @ (k, n)       one product of two matrices, with reshapes before and after
products of one x      one product (`merged_products`)
elementwise(reshape)   reshape(elementwise): an elementwise node right after a product can fuse
other patterns         rewrites that special kernels bring (`rules.operator_rewrites`)

Products of one x are, for example, queries, keys and values of an attention:

    x @ A, x @ B, x @ C  ->  x @ [A B C], and slices of its columns

That saves launches, reads x once, and a wide result keeps more cores busy. Columns of fractals are
outermost in memory, so that the slices are views. Elementwise nodes that follow all of the products
alike, such as a bias, are merged with them. Convolutions of a single image with equal windows are
merged, too, unless a concat reads them: the concat already costs nothing, as each convolution
writes its part of the result in place.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ascend_lab.compiler.draft import Draft, pruned
from ascend_lab.compiler.ir import Attrs, Constant, Graph, Node, TensorType, Values, only_reader
from ascend_lab.compiler.passes import images
from ascend_lab.compiler.rules import operator_rewrites
from ascend_lab.machine.chip import Chip
from ascend_lab.operators.ops.attention import causal_mask, grouped_heads
from ascend_lab.operators.ops.formats import is_float
from ascend_lab.operators.ops.operator import get

BLOCK = 16
FLASH_ATTENTION = "flash_attention"


def canonical(graph: Graph, chip: Chip, *, joint: bool = True) -> Graph:
    """Return the graph in operators that lowering knows; the values stay the same up to rounding.

    With `joint`, two convolutions whose results are added may become one kernel.
    """
    without_attention = _split_attention(pruned(graph), chip)
    flat = _flatten_products(_split_operators(without_attention))
    rewritten = _move_reshapes_down(flat)
    for rewrite in operator_rewrites():
        rewritten = rewrite(rewritten, chip, joint)
    return merged_products(rewritten, chip)


# -- attention ------------------------------------------------------------------------------------
def _split_attention(graph: Graph, chip: Chip) -> Graph:
    draft = Draft(graph)
    for node in draft:
        if node.op in ("attention", FLASH_ATTENTION):
            draft.replace(node.output, _attention(draft, node, chip))
        elif node.op == "attention_context":
            draft.replace(node.output, draft.insert("batch_matmul", node.inputs, {}, node.name))
        elif node.op == "attention_scores":
            draft.replace(node.output, _scores(draft, node.name, node))
    return draft.finish()


def _attention(draft: Draft, node: Node, chip: Chip) -> str:
    """Insert the operators that compute attention on a chip; return the tensor of the result."""
    query, given_key, given_value, *masks = node.inputs
    key, value = (_with_query_heads(draft, name, node) for name in (given_key, given_value))
    operands = (query, key, value, *masks)
    if grouped_heads(*(draft.type(name).shape for name in (query, key, value))) > 1:
        # with two batch axes the kernel would take the heads for groups and stack their rows: give
        # it a single batch axis, and a mask that matches
        full_masks = [_full_mask(draft, name, node) for name in masks]
        operands = tuple(_in_one_batch(draft, name) for name in (query, key, value, *full_masks))
    attrs = node.attrs
    if node.attr("causal", False) and not _has_kernel(draft, operands, attrs, chip):
        operands = (*operands[:3], _causal_mask(draft, node, operands[3:]))
        attrs = {**attrs, "causal": False}
    result = _attention_kernel(draft, replace(node, inputs=operands, attrs=attrs), chip)
    shape = draft.type(node.output).shape
    if draft.type(result).shape == shape:
        return result
    return draft.insert("reshape", (result,), {"shape": shape}, f"{node.name}_heads")


def _attention_kernel(draft: Draft, node: Node, chip: Chip) -> str:
    """Insert the kernel of attention if it applies, else products and a softmax."""
    q, k, v, *masks = node.inputs
    if _has_kernel(draft, node.inputs, node.attrs, chip):
        full_masks = [_full_mask(draft, name, node) for name in masks]
        attrs = {"scale": _scale(draft, node)}
        if node.attr("causal", False):
            attrs["causal"] = True
        return draft.insert(FLASH_ATTENTION, (q, k, v, *full_masks), attrs, node.name)
    scores = _scores(draft, f"{node.name}_scores", node)
    for name in masks:
        scores = draft.insert("add", (scores, name), {}, f"{node.name}_masked")
    weights = draft.insert("softmax", (scores,), {"axis": -1}, f"{node.name}_softmax")
    return draft.insert("batch_matmul", (weights, v), {}, node.name)


def _in_one_batch(draft: Draft, name: str) -> str:
    """Return matrices with all their batch axes merged into one."""
    shape = draft.type(name).shape
    joined = (math.prod(shape[:-2]), *shape[-2:])
    return draft.insert("reshape", (name,), {"shape": joined}, f"{name}_joined")


def _has_kernel(draft: Draft, inputs: Sequence[str], attrs: Attrs, chip: Chip) -> bool:
    """Tell whether the kernel of attention applies and can read the mask."""
    operator = get(FLASH_ATTENTION)
    types = [draft.type(n) for n in inputs]
    call = operator.call([t.shape for t in types], [t.dtype for t in types], attrs)
    has_mask = len(inputs) > 3
    # the rows of a mask can be padded to whole blocks only if the mask is constant
    ragged = has_mask and types[3].shape[-1] % 16 and inputs[3] not in draft.constants
    return not ragged and operator.template_for(call, chip) is not None


def _with_query_heads(draft: Draft, name: str, node: Node) -> str:
    """Return keys or values with one matrix for each head of the queries, or one for all heads."""
    shape = draft.type(name).shape
    batch = draft.type(node.output).shape[:-2]
    if math.prod(shape[:-2]) in (1, math.prod(batch)):
        return name
    if len(shape) < len(batch) + 2 or shape[-3] in (1, batch[-1]):
        return draft.stretched(name, (*batch, *shape[-2:]))
    # grouped heads: (b, g, t, d) -> (b, g, h / g, t, d) -> (b, h, t, d)
    heads = batch[-1] // shape[-3]
    group_shape = {"shape": (*shape[:-2], 1, *shape[-2:])}
    groups = draft.insert("reshape", (name,), group_shape, f"{node.name}_groups")
    repeated = draft.stretched(groups, (*batch[:-1], shape[-3], heads, *shape[-2:]))
    head_shape = {"shape": (*batch, *shape[-2:])}
    return draft.insert("reshape", (repeated,), head_shape, f"{repeated}_heads")


def _causal_mask(draft: Draft, node: Node, masks: Sequence[str]) -> str:
    """Return a mask of the keys that come after each query, added to the node's own mask."""
    kind = draft.type(node.output)
    queries = draft.type(node.inputs[0]).shape[-2]
    keys = draft.type(node.inputs[1]).shape[-2]
    # the lowest number of fp16: softmax turns it into 0, as it does with -infinity
    lowest = -65504.0
    data = np.where(causal_mask(queries, keys), 0.0, lowest)
    mask = draft.add(Constant(TensorType((queries, keys), kind.dtype), data), f"{node.name}_causal")
    for name in masks:
        mask = draft.insert("add", (name, mask), {}, f"{node.name}_mask")
    return mask


def _scale(draft: Draft, node: Node) -> float:
    scale = node.attr("scale")
    width = draft.type(node.inputs[0]).shape[-1]
    return 1.0 / math.sqrt(width) if scale is None else float(scale)


def _scores(draft: Draft, name: str, node: Node) -> str:
    scores = draft.insert("batch_matmul", node.inputs[:2], {"trans_b": True}, name)
    return draft.insert("muls", (scores,), {"number": _scale(draft, node)}, f"{node.name}_scaled")


def _full_mask(draft: Draft, mask: str, node: Node) -> str:
    """Return a mask with a matrix for every batch and head, or one matrix for all."""
    shape = draft.type(mask).shape
    batch = draft.type(node.output).shape[:-2]
    if math.prod(shape[:-2]) in (1, math.prod(batch)):
        return mask
    return draft.stretched(mask, (*batch, *shape[-2:]))


# -- operators in parts ---------------------------------------------------------------------------
def _split_operators(graph: Graph) -> Graph:
    """Replace gemm, batch norm and others by operators that have kernels, as the module says."""
    draft = Draft(graph)
    for node in draft:
        expanded = ""
        if node.op == "gemm":
            expanded = _gemm(draft, node)
        elif node.op == "batch_matmul" and (shapes := _batched_shapes(draft, node)):
            sides = [draft.stretched(n, s) for n, s in zip(node.inputs, shapes, strict=True)]
            expanded = draft.insert(node.op, sides, node.attrs, node.name)
        elif len(node.inputs) > 2 and (
            node.op == "conv_transpose2d"
            or (node.has("convolution") and node.inputs[2] not in draft.constants)
        ):
            expanded = _split_bias(draft, node)
        elif node.op == "batch_norm" and (affine := images.affine_of(draft, node)):
            expanded = _batch_norm(draft, node, affine[1])
        if expanded:
            draft.replace(node.output, expanded)
    return draft.finish()


def _gemm(draft: Draft, node: Node) -> str:
    """Insert alpha a b + beta c as a product, factors and a sum; return the tensor of the sum."""
    a, b, *biases = node.inputs
    transposes = {key: node.attr(key, False) for key in ("trans_a", "trans_b")}
    product = draft.insert("matmul", (a, b), transposes, node.name)
    if node.attr("alpha", 1.0) != 1.0:
        product = draft.insert(
            "muls", (product,), {"number": node.attr("alpha")}, f"{node.name}_alpha"
        )
    if not biases:
        return product
    summand = biases[0]
    if node.attr("beta", 1.0) != 1.0:
        summand = draft.insert("muls", biases, {"number": node.attr("beta")}, f"{node.name}_beta")
    return draft.insert("add", (product, summand), {}, f"{node.name}_bias")


def _batched_shapes(draft: Draft, node: Node) -> tuple[tuple[int, ...], ...]:
    """Return the operands' shapes broadcast to equal batch axes; () if nothing has to change."""
    batch = draft.type(node.output).shape[:-2]
    shapes = [draft.type(n).shape for n in node.inputs]
    # `_flatten` takes products with one constant matrix
    flat = len(shapes[1]) == 2 and node.inputs[1] in draft.constants
    if all(s[:-2] == batch for s in shapes) or (flat and not node.attr("trans_a", False)):
        return ()
    return tuple((*batch, *s[-2:]) for s in shapes)


def _split_bias(draft: Draft, node: Node) -> str:
    """Insert a convolution without bias and the addition of the bias, a number per channel."""
    x, weight, bias = node.inputs
    kind = draft.type(bias)
    constant = draft.constant(bias)
    result = draft.insert(node.op, (x, weight), node.attrs, node.name)
    shape = (*kind.shape, 1, 1)
    column = draft.insert("reshape", (bias,), {"shape": shape})
    if constant is not None:
        kind = TensorType(shape, kind.dtype)
        column = draft.add(Constant(kind, lambda: constant.array().reshape(shape)), bias)
    return draft.insert("add", (result, column), {}, f"{node.name}_bias")


def _batch_norm(draft: Draft, node: Node, affine: images.Affine) -> str:
    """Insert a batch norm as a x + c, with constants a and c per channel."""
    kind = draft.type(node.inputs[0])
    shape = (kind.shape[1], *(1,) * (len(kind.shape) - 2))
    column = TensorType(shape, kind.dtype)

    def constant_values(place: int) -> Values:
        scale_and_shift = affine.wide(tuple(constant.array() for constant in affine.sources))
        return np.asarray(scale_and_shift[place]).reshape(shape)

    factor = draft.add(Constant(column, lambda: constant_values(0)), f"{node.name}_scale")
    shift = draft.add(Constant(column, lambda: constant_values(1)), f"{node.name}_shift")
    scaled = draft.insert("mul", (node.inputs[0], factor), {}, node.name)
    return draft.insert("add", (scaled, shift), {}, f"{node.name}_add")


# -- products of matrices -------------------------------------------------------------------------
def _flatten_products(graph: Graph) -> Graph:
    """Turn every (.., m, k) @ constant (k, n) into one product (.. m, k) @ (k, n)."""
    draft = Draft(graph)
    for node in draft:
        if node.op not in ("matmul", "batch_matmul") or node.attr("trans_a", False):
            continue
        a, b = (draft.type(n).shape for n in node.inputs)
        if len(a) <= 2 or len(b) != 2 or node.inputs[1] not in draft.constants:
            continue
        # (8, 128, 768) @ (768, 768) has 8 * 128 = 1,024 rows
        rows = {"shape": (math.prod(a[:-1]), a[-1])}
        flat = draft.insert("reshape", node.inputs[:1], rows, f"{node.name}_flat")
        product = draft.insert("matmul", (flat, node.inputs[1]), node.attrs, node.name)
        shape = {"shape": draft.type(node.output).shape}
        draft.replace(node.output, draft.insert("reshape", (product,), shape, f"{node.name}_nd"))
    return draft.finish()


def _move_reshapes_down(graph: Graph) -> Graph:
    """Move reshapes that only split rows to after the elementwise nodes that read them.

    These nodes may read nothing else but constants that broadcast along rows.
    """
    draft = Draft(graph)
    flat_names = dict[str, str]()
    # reshapes of a matrix (m, n) to (.., n): only the rows are split
    for node in graph.nodes:
        if node.op == "reshape":
            source = graph.types[node.inputs[0]].shape
            shape = graph.types[node.output].shape
            if len(source) == 2 and len(shape) > 2 and source[-1] == shape[-1]:
                flat_names[node.output] = node.inputs[0]
    for node in draft:
        if not node.has("lanes") or not any(n in flat_names for n in node.inputs):
            continue
        # a constant row broadcasts to the shape before the reshape, too
        row_constants = {
            n for n in node.inputs if n in draft.constants and len(draft.type(n).shape) <= 1
        }
        operands = [flat_names.get(n) or (n if n in row_constants else "") for n in node.inputs]
        if all(operands):
            result = draft.insert(node.op, operands, node.attrs, node.name)
            sizes = {"shape": draft.type(node.output).shape}
            reshaped = draft.insert("reshape", (result,), sizes, f"{node.name}_nd")
            draft.replace(node.output, reshaped)
            flat_names[reshaped] = result
    return draft.finish()


# -- products of one tensor ----------------------------------------------------------------------
def merged_products(graph: Graph, chip: Chip) -> Graph:
    """Return the graph with one product in place of several that read the same tensor."""
    families: dict[tuple[object, ...], list[Node]] = {}
    for node in graph.nodes:
        if node.op in ("matmul", "conv2d") and _can_merge(graph, node):
            # products may be merged if they read one tensor with equal windows and attributes
            key = (node.inputs[0], len(node.inputs), *graph.types[node.inputs[1]].shape[2:])
            families.setdefault((*key, *sorted(node.attrs.items())), []).append(node)
    draft = Draft(graph)
    for nodes in families.values():
        # slices are views at multiples of 16 columns: only the last result may have another width
        ragged = [node for node in nodes if graph.types[node.output].shape[1] % BLOCK]
        family = [node for node in nodes if node not in ragged] + ragged[:1]
        chains = _common_chains(graph, family)
        followers = [only_reader(graph, chain[-1]) for chain in chains]
        fuses_alone = any(n is not None and n.has("lanes", "largest") for n in followers)
        fuses_alone &= chip.combined or family[0].has("convolution")
        # an elementwise node after only one of the products stays in that product's kernel
        if len(family) > 1 and not fuses_alone:
            _merge(draft, chains)
    return draft.finish()


def _can_merge(graph: Graph, node: Node) -> bool:
    """Tell whether a product may be merged: constant weights, results as outermost columns.

    That holds for matrices in fractals and for the channels of a single image.
    """
    result_type = graph.types[node.output]
    if node.op == "matmul":
        has_form = len(result_type.shape) == len(node.inputs) == 2 and not node.attr(
            "trans_a", False
        )
    else:
        readers = {
            reader.op for reader in graph.readers[_common_chains(graph, [node])[0][-1].output]
        }
        has_form = result_type.shape[0] == node.attr("groups", 1) == 1 and "concat" not in readers
    return (
        has_form
        and is_float(result_type.dtype)
        and all(n in graph.constants for n in node.inputs[1:])
    )


def _common_chains(graph: Graph, family: list[Node]) -> list[list[Node]]:
    """Return each product with the elementwise nodes after it that all the products share."""
    chains = [[node] for node in family]
    while True:
        readers = [only_reader(graph, chain[-1]) for chain in chains]
        pairs = [(n, c[-1]) for n, c in zip(readers, chains, strict=True) if n is not None]
        operators = {(n.op, *sorted(n.attrs.items())) for n, _ in pairs}
        all_alike = len(pairs) == len(chains) and len(operators) == 1
        # the chains end here: a reader is missing, differs or reads another tensor
        if not all_alike or not all(_extends_chain(graph, n, tail) for n, tail in pairs):
            return chains
        for chain, (node, _) in zip(chains, pairs, strict=True):
            chain.append(node)


def _extends_chain(graph: Graph, node: Node, tail: Node) -> bool:
    """Tell whether a node reads its chain, and at most one constant with a number per column."""
    operands = node.inputs[1:]
    reads_chain = node.has("lanes") and node.inputs[0] == tail.output and len(operands) < 2
    kind = graph.types[node.output]
    width = graph.types[tail.output].shape[1:]
    keeps_type = kind == graph.types[tail.output]
    are_columns = all(n in graph.constants and graph.types[n].shape == width for n in operands)
    return reads_chain and keeps_type and are_columns


def _merge(draft: Draft, chains: list[list[Node]]) -> None:
    """Insert one chain with joined constants, and a slice of its result for each product."""
    head_product = chains[0][0]
    # the axis of output channels in the weights: (Co, Ci, 1, 1), (n, k) or (k, n)
    axis = 0 if head_product.op == "conv2d" or head_product.attr("trans_b", False) else 1
    merged = head_product.inputs[0]
    for nodes in zip(*chains, strict=True):
        # of a product the weights, perhaps a bias; of an elementwise node at most one constant
        constants = []
        for place, names in enumerate(zip(*(n.inputs[1:] for n in nodes), strict=True)):
            is_weight = nodes[0] is head_product and place == 0
            constants.append(_joined(draft, list(names), axis if is_weight else 0))
        merged = draft.insert(nodes[0].op, (merged, *constants), nodes[0].attrs, nodes[0].name)
    shape = draft.type(merged).shape
    first_column = 0
    for chain in chains:
        last_column = first_column + draft.type(chain[-1].output).shape[1]
        begin = tuple(first_column if i == 1 else 0 for i in range(len(shape)))
        attrs = {"begin": begin, "end": (shape[0], last_column, *shape[2:])}
        columns = draft.insert("slice", (merged,), attrs, f"{chain[-1].name}_part")
        draft.replace(chain[-1].output, columns)
        first_column = last_column


def _joined(draft: Draft, names: list[str], axis: int) -> str:
    """Add the concatenation of constants, computed only when it is read."""
    constants = [draft.constants[name] for name in names]
    shape = list(constants[0].type.shape)
    shape[axis] = sum(p.type.shape[axis] for p in constants)
    kind = TensorType(tuple(shape), constants[0].type.dtype)
    joined = Constant(kind, lambda: np.concatenate([part.array() for part in constants], axis))
    return draft.add(joined, f"{names[0]}_all")
