"""Describes the structure of a language model by a table of sizes, and counts its weights.

A decoder is a stack of layers. Each layer has an attention and a feed-forward part. The attention
is of one of two types: heads share keys in groups (Llama, Qwen), or heads share one latent
vector per token (DeepSeek). The feed-forward part is one block for all tokens, or a mixture of
experts.

`load_decoder("qwen3_8b")` reads a table of `models.toml`; a path reads a table of the user's own.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from ascend_lab.errors import InputError
from ascend_lab.limits import read_file, shown

TABLES = Path(__file__).with_name("models.toml")
PREFIX = "zoo:"
"""Begins a name that stands for a table of `models.toml`, as "zoo:qwen3_8b"."""
TABLE_BYTES = 1 << 20
"""Largest file of a user's own table that is read."""
LARGEST_SIZE = 1 << 24
"""Largest number of a table; a larger one is taken for a mistake of units."""


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Attention in which `heads / kv_heads` query heads share the keys and values of one head.

    `head_dim` is the length of a head's query, key and value. With `qk_norm` queries and keys pass
    a norm of their own, head by head; with `bias` the projections to q, k and v add biases.
    """

    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool = False
    bias: bool = False

    @property
    def query_width(self) -> int:
        """Numbers of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Numbers of all keys of a token; its values have as many."""
        return self.kv_heads * self.head_dim

    def weights(self, hidden: int) -> int:
        """Return hidden (q + 2 k) + q hidden, plus the biases and the weights of norms."""
        # qwen3_8b: 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 2 * 128 = 41,943,296.
        in_width = self.query_width + 2 * self.key_width
        projections = hidden * in_width + self.query_width * hidden
        biases = in_width if self.bias else 0
        norms = 2 * self.head_dim if self.qk_norm else 0
        return projections + biases + norms

    @property
    def cached_numbers(self) -> int:
        """Numbers that the cache holds for a token of a layer: its keys and its values."""
        return 2 * self.key_width


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Attention whose heads share one latent vector per token (DeepSeek-V2, section 2.1).

    The cache holds `kv_rank` latent numbers and `rope_dim` numbers of a key that carries the
    position. `q_rank` 0 means that queries are computed without a latent vector of their own. A
    head's query and key have `nope_dim` numbers without a position and `rope_dim` that rotate with
    it, and its value has `value_dim` numbers.
    """

    heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def query_width(self) -> int:
        """Numbers of all queries of a token."""
        return self.heads * (self.nope_dim + self.rope_dim)

    @property
    def value_width(self) -> int:
        """Numbers of all heads' results of a token."""
        return self.heads * self.value_dim

    def weights(self, hidden: int) -> int:
        """Return the weights of a layer's projections and norms.

        There are five and two of them, or four and one if `q_rank` is 0.
        """
        if self.q_rank:
            queries = hidden * self.q_rank + self.q_rank + self.q_rank * self.query_width
        else:
            queries = hidden * self.query_width
        latent = hidden * (self.kv_rank + self.rope_dim) + self.kv_rank
        # deepseek_v3: all five projections and both norms of a layer together are 187,107,328
        # weights.
        keys_and_values = self.kv_rank * self.heads * (self.nope_dim + self.value_dim)
        return queries + latent + keys_and_values + self.value_width * hidden

    @property
    def cached_numbers(self) -> int:
        """Numbers that the cache holds for a token of a layer."""
        # deepseek_v3: 512 + 64 = 576, where 128 heads of their own keys would have 128 * (192 +
        # 128).
        return self.kv_rank + self.rope_dim


Attention = GroupedAttention | LatentAttention


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of `count` experts, blocks of a `width`; each token is sent to `chosen` of them.

    `shared_width` is the width of a block that every token passes through (0: there is none). The
    first `dense_layers` layers of the model have a dense block instead of experts. If `corrected`,
    a bias of each expert is added to its score for the choice.
    """

    count: int
    chosen: int
    width: int
    shared_width: int = 0
    dense_layers: int = 0
    corrected: bool = False

    def weights(self, hidden: int) -> int:
        """Return the weights of all experts, the shared block and the router of a layer."""
        blocks = 3 * hidden * (self.count * self.width + self.shared_width)
        router = hidden * self.count + (self.count if self.corrected else 0)
        return blocks + router


@dataclass(frozen=True, slots=True)
class Decoder:
    """A language model: `layers` of attention and feed-forward part, and a head over words.

    `dense_width` is the width of the feed-forward block of layers without experts. If `tied`, the
    head uses the weights of the embedding. `published` is the number of weights that its source
    states, `positions` the longest context that the source allows (0: unknown).
    """

    name: str
    title: str
    source: str
    layers: int
    hidden: int
    vocabulary: int
    attention: Attention
    dense_width: int = 0
    experts: Experts | None = None
    tied: bool = False
    published: int = 0
    positions: int = 0

    @property
    def dense_layers(self) -> int:
        """Layers whose feed-forward part is one block for all tokens."""
        return self.layers if self.experts is None else self.experts.dense_layers

    def layer_weights(self, dense: bool) -> int:
        """Return the weights of a layer: attention, feed-forward part, and its two norms."""
        attention = self.attention.weights(self.hidden)
        if dense or self.experts is None:
            feed_forward = 3 * self.hidden * self.dense_width
        else:
            feed_forward = self.experts.weights(self.hidden)
        return attention + feed_forward + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """All weights: layers, embedding, head unless it is tied, and the last norm."""
        sparse_layers = self.layers - self.dense_layers
        # qwen3_8b: 36 layers, two tables of 151,936 x 4096 and the last norm are 8,190,735,360
        # weights.
        layers = self.dense_layers * self.layer_weights(True)
        layers += sparse_layers * self.layer_weights(False)
        tables = 1 if self.tied else 2
        return layers + tables * self.vocabulary * self.hidden + self.hidden

    def cache_bytes(self, number_bytes: float = 2) -> float:
        """Return the bytes of one token in the caches of all layers, on all devices together."""
        # qwen3_8b: 36 * 2048 * 2 = 147,456 bytes a token; deepseek_v3: 61 * 576 * 2 = 70,272.
        return self.layers * self.attention.cached_numbers * number_bytes


# -- tables ----------------------------------------------------------------------------------------
@cache
def _built_in() -> Mapping[str, Mapping[str, Any]]:
    """Return the tables of the models that come with the package."""
    return tomllib.loads(TABLES.read_text("utf-8"))


def decoder_names() -> tuple[str, ...]:
    """Return the names of the models that come with the package."""
    return tuple(_built_in())


def load_decoder(name: str | Path) -> Decoder:
    """Return a decoder by name (`qwen3_8b`, `zoo:qwen3_8b`) or from a .toml file of one table.

    Raises `InputError` for an unknown name, and for a table with missing, unknown or wrong entries.
    """
    text = str(name)
    if text.endswith(".toml"):
        data = read_file(text, "a table of a decoder", TABLE_BYTES)
        return decoder_of(Path(text).stem, _parse_toml(text, data), text)
    # "zoo:Qwen2.5-7B" is qwen2_5_7b.
    key = text.removeprefix(PREFIX).lower().replace("-", "_").replace(".", "_")
    tables = _built_in()
    if key not in tables:
        close = get_close_matches(key, tables, 1)
        hint = f"did you mean {close[0]}?" if close else f"one of {', '.join(tables)}"
        raise InputError("a language model by name, or a .toml file", shown(text), hint)
    return decoder_of(key, tables[key], key)


def _parse_toml(path: str, data: bytes) -> Mapping[str, Any]:
    """Return the table in a file; raises `InputError` if it is not TOML."""
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: a TOML file", str(error)[:80], "correct that line") from None


def decoder_of(name: str, table: Mapping[str, Any], where: str) -> Decoder:
    """Return the decoder of a table; raises `InputError` naming the entry that is wrong."""
    scalar_entries = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    attention_table = table.get("attention", {})
    if not isinstance(attention_table, Mapping):
        raise InputError(f"{where}: a table [attention]", shown(attention_table), "write one")
    attention_class: type[Attention] = (
        LatentAttention if "kv_rank" in attention_table else GroupedAttention
    )
    attention = _record(attention_class, attention_table, f"{where}: attention")
    experts = None
    if isinstance(table.get("experts"), Mapping):
        experts = _record(Experts, table["experts"], f"{where}: experts")
        if experts.chosen > experts.count:
            needed = f"{where}: chosen of at most {experts.count} experts"
            raise InputError(needed, str(experts.chosen), "correct the table")
    entries = {"title": name, "source": where, **scalar_entries}
    parts = {"name": name, "attention": attention, "experts": experts}
    decoder: Decoder = _record(Decoder, {**entries, **parts}, where)
    if decoder.dense_layers and not decoder.dense_width:
        raise InputError(f"{where}: dense_width of the dense layers", "none", "add it")
    if isinstance(attention, GroupedAttention) and attention.heads % attention.kv_heads:
        needed = f"{where}: heads that are a multiple of {attention.kv_heads} kv_heads"
        raise InputError(needed, str(attention.heads), "correct the table")
    return decoder


def _record(record_class: type[Any], entries: Mapping[str, Any], where: str) -> Any:
    """Return a record with a table's entries; raises `InputError` for wrong or missing ones."""
    known_fields = {field.name: field for field in fields(record_class)}
    for key, value in entries.items():
        if key not in known_fields:
            close = get_close_matches(key, known_fields, 1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known_fields)}"
            raise InputError(f"{where}: known entries", shown(key), hint)
        if known_fields[key].type == "int" and key != "published":
            # The default 0 marks a size of something that a model may lack.
            smallest = 0 if known_fields[key].default == 0 or key == "q_rank" else 1
            if not _is_integer(value) or not smallest <= value <= LARGEST_SIZE:
                needed = f"{where}: {key} as a whole number from {smallest} to {LARGEST_SIZE}"
                raise InputError(needed, shown(value), "correct that entry")
        if known_fields[key].type == "bool" and not isinstance(value, bool):
            raise InputError(f"{where}: {key} as true or false", shown(value), "correct that entry")
    try:
        return record_class(**entries)
    except TypeError as error:
        missing = str(error).rpartition(":")[2].strip()
        raise InputError(f"{where}: {missing}", "nothing", "add it") from None


def _is_integer(value: object) -> bool:
    """Tell whether a value is an integer; True is not, although `isinstance(True, int)` holds."""
    return isinstance(value, int) and not isinstance(value, bool)
