"""Computes the memory that a decoder takes on a device, and the largest batch that fits.

Weights take the same room for every batch. Each sequence adds the pages of its cache and its share
of the activations, so that

    largest batch = (memory - weights) / (pages + activations of one sequence)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ascend_lab.llm.formats import WIDE_BYTES, Format
from ascend_lab.llm.layer import PAGE_TOKENS, group_batch, latent_bytes, pages_of
from ascend_lab.llm.models import Decoder, GroupedAttention
from ascend_lab.llm.plan import Load, Plan, Shard
from ascend_lab.machine.chip import Chip

SCORE_BYTES = 4
"""Bytes of the score of one word: scores are fp32 when the next word is drawn."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The bytes that the fullest device stores, and the size of its memory in bytes.

    `largest_batch` counts the sequences of all data-parallel groups together.
    """

    weights_bytes: float
    cache_bytes: float
    activations_bytes: float
    device_bytes: float
    largest_batch: int

    @property
    def total_bytes(self) -> float:
        """Weights, cache and activations."""
        return self.weights_bytes + self.cache_bytes + self.activations_bytes

    @property
    def fits(self) -> bool:
        """Whether the device has room for them."""
        return self.total_bytes <= self.device_bytes


def weight_bytes_of(decoder: Decoder, plan: Plan, shard: Shard, number_format: Format) -> float:
    """Return the bytes of weights on the fullest device.

    Linear layers are in the format; embedding, head, router and norms have two bytes a number.
    """
    hidden = decoder.hidden
    attention = decoder.attention
    if isinstance(attention, GroupedAttention):
        # q and out have `width` columns or rows, k and v one head's dim for each head of keys:
        # qwen3_8b undivided, 4096 * (2 * 4096 + 2 * 1024) = 41.9 million weights a layer.
        width = shard.heads * attention.head_dim
        linear = hidden * (2 * width + 2 * shard.kv_heads * attention.head_dim)
        two_byte_projection = 0
    else:
        queries = shard.heads * (attention.nope_dim + attention.rope_dim)
        rank = attention.q_rank or hidden
        linear = (hidden * attention.q_rank if attention.q_rank else 0) + rank * queries
        linear += hidden * attention.cached_numbers
        linear += shard.heads * attention.value_dim * hidden
        # Decoding uses the projections of keys and of values separately (see `graphs`): they
        # stay in two bytes.
        two_byte_projection = (
            attention.kv_rank * shard.heads * (attention.nope_dim + attention.value_dim)
        )
    # A SwiGLU block has three matrices of hidden x width: gate, up and down.
    dense_layer = linear + 3 * hidden * shard.dense_width
    sparse_layer = linear + 3 * hidden * (shard.experts * shard.expert_width + shard.shared_width)
    router = hidden * decoder.experts.count if decoder.experts is not None else 0
    dense_layers = decoder.dense_layers
    sparse_layers = decoder.layers - dense_layers
    # Assumed: every pipeline stage has dense and sparse layers in the same ratio as the model.
    share = shard.layers / decoder.layers
    linear_weights = share * (dense_layers * dense_layer + sparse_layers * sparse_layer)
    wide_weights = share * (sparse_layers * router + decoder.layers * two_byte_projection)
    tables = 1 if decoder.tied else 2
    wide_weights += tables * shard.words * hidden / plan.pp
    # qwen3_8b with tp 4 in bf16: 4.1 GB a device.
    return linear_weights * number_format.weight_bytes + wide_weights * WIDE_BYTES


def sequence_bytes(decoder: Decoder, shard: Shard, tokens: int, number_format: Format) -> float:
    """Return the bytes of the pages of one sequence on one device."""
    attention = decoder.attention
    if isinstance(attention, GroupedAttention):
        # qwen3_8b with tp 4: 2 heads of keys a device, 2 * 2 * 128 * 2 = 1024 bytes a layer and
        # token; 4096 tokens in 36 layers take 151 MB.
        token_bytes = 2 * shard.kv_heads * attention.head_dim * WIDE_BYTES
    else:
        # Every device of a tensor-parallel group stores the whole latent vector.
        token_bytes = latent_bytes(attention, number_format)
    return float(shard.layers * pages_of(tokens) * PAGE_TOKENS * token_bytes)


def activation_bytes_of(decoder: Decoder, shard: Shard, load: Load, plan: Plan) -> float:
    """Return the bytes of the largest tensors that are live at once: a block's, and the scores."""
    batch = group_batch(load, plan)
    rows = batch * load.tokens
    widest = 2 * shard.dense_width
    if decoder.experts is not None:
        per_token = decoder.experts.chosen * (decoder.hidden + 2 * shard.expert_width)
        widest = max(widest, math.ceil(per_token * plan.dp / plan.ep) + 2 * shard.shared_width)
    # Only the last token of a prompt needs a successor; every new token of a decode step does.
    scored = rows if load.phase == "decode" else batch
    block_bytes = rows * (2 * decoder.hidden + widest) * WIDE_BYTES
    return float(block_bytes + scored * shard.words * SCORE_BYTES)


def memory_of(
    decoder: Decoder, plan: Plan, shard: Shard, load: Load, number_format: Format, chip: Chip
) -> Memory:
    """Return the bytes of the fullest device for a load."""
    weights_bytes = weight_bytes_of(decoder, plan, shard, number_format)
    cache_bytes = sequence_bytes(decoder, shard, load.keys, number_format)
    device_bytes = float(chip.device_memory.size_bytes)
    single_sequence = replace(load, batch=plan.dp)
    sequence_total_bytes = cache_bytes + activation_bytes_of(decoder, shard, single_sequence, plan)
    # Cache and activations both grow in proportion to the number of sequences.
    largest_batch = plan.dp * max(0, int((device_bytes - weights_bytes) // sequence_total_bytes))
    return Memory(
        weights_bytes,
        group_batch(load, plan) * cache_bytes,
        activation_bytes_of(decoder, shard, load, plan),
        device_bytes,
        largest_batch,
    )
