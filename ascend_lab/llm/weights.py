"""Draws random weights of a decoder, cut into the slices that each device of a plan stores.

The full tensors depend on the seed only, not on the plan, and are cut to the shapes of
`plan.shard_of`: so all plans compute the same function.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.llm.models import Decoder, GroupedAttention
from ascend_lab.llm.plan import Plan, shard_of

Array = NDArray[Any]
Weights = Mapping[str, Array]


# -- full tensors ----------------------------------------------------------------------------------
def weights_of(decoder: Decoder, seed: int = 0) -> dict[str, Array]:
    """Return the full tensors of a decoder; those of layer 1 are named "1.q", "1.ffn.down", ..."""
    hidden = decoder.hidden
    table_shape = (decoder.vocabulary, hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": table_shape,
        "head": table_shape,
        "norm": (hidden,),
    }
    for layer in range(decoder.layers):
        named = _attention_shapes(decoder) | _feed_forward_shapes(decoder, layer)
        shapes |= {f"{layer}.{name}": shape for name, shape in named.items()}
    tensors = {name: _seeded_tensor(name, shape, seed) for name, shape in shapes.items()}
    if decoder.tied:
        tensors["head"] = tensors["embedding"]
    return tensors


def _seeded_tensor(name: str, shape: tuple[int, ...], seed: int) -> Array:
    """Return a random tensor: norms scale by about 1, and products keep the variance of x."""
    # The name is part of the seed: a tensor stays the same whatever other tensors a decoder has.
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    normal_values = rng.standard_normal(shape)
    if name.endswith("norm"):
        tensor = 1 + normal_values / 10
    elif name.endswith("bias"):
        tensor = normal_values / 10
    else:
        # Sums of `depth` products of variance 1 have variance `depth`: dividing by its root
        # restores 1.
        depth = shape[1] if len(shape) > 1 else shape[0]
        tensor = normal_values / math.sqrt(depth)
    return tensor.astype(np.float32)


def _attention_shapes(decoder: Decoder) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a layer's attention; linear layers are (columns, depth)."""
    hidden = decoder.hidden
    attention = decoder.attention
    shapes: dict[str, tuple[int, ...]] = {"attention.norm": (hidden,)}
    if isinstance(attention, GroupedAttention):
        shapes["q"] = (attention.query_width, hidden)
        shapes["k"] = (attention.key_width, hidden)
        shapes["v"] = (attention.key_width, hidden)
        shapes["out"] = (hidden, attention.query_width)
        if attention.bias:
            shapes |= {f"{name}.bias": shapes[name][:1] for name in "qkv"}
        if attention.qk_norm:
            shapes |= {f"{name}.norm": (attention.head_dim,) for name in "qk"}
        return shapes
    rank = attention.kv_rank
    if attention.q_rank:
        shapes["q.down"] = (attention.q_rank, hidden)
        shapes["q.norm"] = (attention.q_rank,)
    shapes["q.up"] = (attention.query_width, attention.q_rank or hidden)
    shapes["kv.down"] = (rank + attention.rope_dim, hidden)
    shapes["kv.norm"] = (rank,)
    shapes["kv.up"] = (attention.heads * (attention.nope_dim + attention.value_dim), rank)
    shapes["out"] = (hidden, attention.value_width)
    return shapes


def _feed_forward_shapes(decoder: Decoder, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a layer's feed-forward part; those of experts are (depth, columns)."""
    hidden = decoder.hidden
    experts = decoder.experts
    norm = {"ffn.norm": (hidden,)}
    if experts is None or layer < decoder.dense_layers:
        return norm | _block_shapes("ffn", hidden, decoder.dense_width)
    shapes: dict[str, tuple[int, ...]] = {**norm, "router": (experts.count, hidden)}
    if experts.corrected:
        shapes["router.bias"] = (experts.count,)
    shapes["experts.gate"] = (experts.count, hidden, experts.width)
    shapes["experts.up"] = (experts.count, hidden, experts.width)
    shapes["experts.down"] = (experts.count, experts.width, hidden)
    if experts.shared_width:
        shapes |= _block_shapes("shared", hidden, experts.shared_width)
    return shapes


def _block_shapes(name: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a SwiGLU block."""
    columns = (width, hidden)
    return {f"{name}.gate": columns, f"{name}.up": columns, f"{name}.down": (hidden, width)}


# -- slices ----------------------------------------------------------------------------------------
def slice_of(tensor: Array, axis: int, size: int, index: int) -> Array:
    """Return part number `index` of a tensor that is cut into parts of a size along an axis."""
    return tensor.take(range(index * size, (index + 1) * size), axis)


class Slices:
    """The weights that each device of a stage feeds into its graphs, layer by layer.

    Device d is number d mod tp of data-parallel group d // tp. It has part d mod parts of the
    experts of set d // parts, where parts = tp dp / ep.
    """

    def __init__(self, decoder: Decoder, plan: Plan, weights: Weights) -> None:
        self.decoder = decoder
        self.plan = plan
        self.shard = shard_of(decoder, plan)
        self.weights = weights

    def attention(self, layer: int, device: int) -> dict[str, Array]:
        """Return the weights of attention, cut by heads; the output projection is cut in depth."""
        shard = self.shard
        attention = self.decoder.attention
        rank = device % self.plan.tp
        tensors = self._layer_tensors(layer)
        slices = {"norm": tensors["attention.norm"]}
        if isinstance(attention, GroupedAttention):
            dim = attention.head_dim
            # 4 devices, 2 heads of keys: devices 0 and 1 have the first, 2 and 3 the second.
            copies = max(1, self.plan.tp // attention.kv_heads)
            q_cut = (shard.heads * dim, rank)
            kv_cut = (shard.kv_heads * dim, rank // copies)
            cuts = {"q": q_cut, "k": kv_cut, "v": kv_cut}
            joined = [slice_of(tensors[name], 0, *cut) for name, cut in cuts.items()]
            slices["qkv"] = np.concatenate(joined)
            if attention.bias:
                biases = [slice_of(tensors[f"{name}.bias"], 0, *cut) for name, cut in cuts.items()]
                slices["qkv.bias"] = np.concatenate(biases)
            shared_names = ("q.norm", "k.norm") if attention.qk_norm else ()
            out_depth = shard.heads * dim
        else:
            query_width = shard.heads * (attention.nope_dim + attention.rope_dim)
            slices["q.up"] = slice_of(tensors["q.up"], 0, query_width, rank)
            up_width = shard.heads * (attention.nope_dim + attention.value_dim)
            slices["kv.up"] = slice_of(tensors["kv.up"], 0, up_width, rank)
            shared_names = (
                "kv.down",
                "kv.norm",
                *(("q.down", "q.norm") if attention.q_rank else ()),
            )
            out_depth = shard.heads * attention.value_dim
        # every device stores these tensors uncut
        slices |= {name: tensors[name] for name in shared_names}
        slices["out"] = slice_of(tensors["out"], 1, out_depth, rank)
        return slices

    def feed_forward(self, layer: int, device: int) -> dict[str, Array]:
        """Return the weights of norm and dense block, or of norm, router and shared block."""
        tensors = self._layer_tensors(layer)
        slices = {"norm": tensors["ffn.norm"]}
        if layer < self.decoder.dense_layers:
            return slices | self._block(tensors, "ffn", self.shard.dense_width, device)
        slices |= {name: tensors[name] for name in ("router", "router.bias") if name in tensors}
        if self.shard.shared_width:
            slices |= self._block(tensors, "shared", self.shard.shared_width, device)
        return slices

    def experts(self, layer: int, device: int) -> dict[str, Array]:
        """Return the weights of a device's experts, cut along their width."""
        tensors = self._layer_tensors(layer)
        expert_set, width_part = divmod(device, self.plan.expert_parts)
        local = {
            name: slice_of(tensors[f"experts.{name}"], 0, self.shard.experts, expert_set)
            for name in ("gate", "up", "down")
        }
        width = self.shard.expert_width
        # Each device takes its columns of gate and of up, then joins them: cutting the joined
        # matrix would give one device all of gate.
        gate_up = [slice_of(local[name], 2, width, width_part) for name in ("gate", "up")]
        return {
            "experts.gate_up": np.concatenate(gate_up, axis=2),
            "experts.down": slice_of(local["down"], 1, width, width_part),
        }

    def head(self, device: int) -> dict[str, Array]:
        """Return the last norm and a device's rows of the head, padded with zeros at the end."""
        # 10 words on tp 4: 3 a device, so the last device gets 1 word and 2 rows of zeros.
        missing = self.shard.words * self.plan.tp - self.decoder.vocabulary
        table = np.pad(self.weights["head"], ((0, missing), (0, 0)))
        rows = slice_of(table, 0, self.shard.words, device % self.plan.tp)
        return {"norm": self.weights["norm"], "head": rows}

    def _layer_tensors(self, layer: int) -> dict[str, Array]:
        """Return the full tensors of a layer, without its number in their names."""
        prefix = f"{layer}."
        return {k.removeprefix(prefix): v for k, v in self.weights.items() if k.startswith(prefix)}

    def _block(self, tensors: Weights, name: str, width: int, device: int) -> dict[str, Array]:
        """Return the slices of a SwiGLU block: columns of gate and up, and the depth of down."""
        rank = device % self.plan.tp
        gate_up = [slice_of(tensors[f"{name}.{half}"], 0, width, rank) for half in ("gate", "up")]
        down = slice_of(tensors[f"{name}.down"], 1, width, rank)
        return {f"{name}.gate_up": np.concatenate(gate_up), f"{name}.down": down}
