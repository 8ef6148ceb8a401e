"""The paged cache of a language model's keys and values: blocks, tables, and shared beginnings.

A sequence's keys and values lie in blocks of a fixed number of tokens, anywhere in memory; its
table lists them in order. Sequences with a common beginning share blocks, and each block counts its
readers. A sequence that writes into a shared block gets a copy first (Kwon et al., 2023, arXiv
2309.06180).
"""

from dataclasses import dataclass, field

from ascend_lab.errors import CapacityError, InputError


def token_bytes(layers: int, kv_heads: int, head_dim: int, element_bytes: int = 2) -> int:
    """Return the bytes of one token's keys and values: 2 * layers * heads * depth * bytes."""
    # Llama 2 7B in FP16: 2 * 32 * 32 * 128 * 2 bytes = 512 KiB a token
    return 2 * layers * kv_heads * head_dim * element_bytes


def blocks_in(memory_bytes: float, block_tokens: int, bytes_of_token: int, cards: int = 1) -> int:
    """Return the blocks that a card's memory holds; heads are divided among `cards`.

    The rule of MindIE-LLM's user guide: floor(memory / (block * bytes of a token)).
    """
    return int(memory_bytes * cards // (block_tokens * bytes_of_token))


def blocks_of(tokens: int, block_tokens: int) -> int:
    """Return the number of blocks for some tokens; the last one may have room for more."""
    # 130 tokens in blocks of 128 take 2
    return -(-tokens // block_tokens)


@dataclass(slots=True)
class BlockCache:
    """Blocks, the number of readers of each, and the table and length of every sequence."""

    blocks: int
    block_tokens: int
    free: list[int] = field(init=False)
    readers: list[int] = field(init=False)
    tables: dict[int, list[int]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.blocks < 1 or self.block_tokens < 1:
            got = f"{self.blocks} of {self.block_tokens}"
            raise InputError("at least one block of at least one token", got)
        # a stack: block 0 is taken first, and a block that was freed is the next to be taken
        self.free = list(range(self.blocks))[::-1]
        self.readers = [0] * self.blocks

    def needs(self, sequence: int, tokens: int) -> int:
        """Return how many free blocks appending `tokens` takes, that of a copy included."""
        length = self.lengths.get(sequence, 0)
        # 4 tokens a block: from 6 to 7 tokens none, from 6 to 9 tokens 3 - 2 = 1
        new_blocks = blocks_of(length + tokens, self.block_tokens)
        new_blocks -= blocks_of(length, self.block_tokens)
        return new_blocks + (tokens > 0 and self._shares_last(sequence))

    def _shares_last(self, sequence: int) -> bool:
        """Tell whether the next token goes into a block that others read, too."""
        # after a full block the next token begins a new one, which nobody else has
        tokens_in_last = self.lengths.get(sequence, 0) % self.block_tokens
        return bool(tokens_in_last) and self.readers[self.tables[sequence][-1]] > 1

    def append(self, sequence: int, tokens: int = 1) -> tuple[int, int] | None:
        """Make room for more tokens of a sequence, which may be a new one.

        Returns (from, to) if a block must be copied first. Raises `CapacityError`, and changes
        nothing, if too few blocks are free.
        """
        if (needed := self.needs(sequence, tokens)) > len(self.free):
            raise CapacityError(f"{needed} free blocks", str(len(self.free)), "preempt a sequence")
        table = self.tables.setdefault(sequence, [])
        copy = None
        if tokens > 0 and self._shares_last(sequence):
            shared_block = table[-1]
            new_block = self.free.pop()
            self.readers[shared_block] -= 1
            self.readers[new_block] = 1
            table[-1] = new_block
            copy = (shared_block, new_block)
        length = self.lengths.get(sequence, 0) + tokens
        self.lengths[sequence] = length
        while len(table) < blocks_of(length, self.block_tokens):
            table.append(self.free.pop())
            self.readers[table[-1]] = 1
        return copy

    def fork(self, parent: int, child: int) -> None:
        """Start a new sequence with the tokens of another: for beam search, or several answers."""
        if child in self.tables:
            raise InputError("a new sequence", str(child), "drop the old one first")
        self.tables[child] = list(self.tables[parent])
        self.lengths[child] = self.lengths[parent]
        for block in self.tables[child]:
            self.readers[block] += 1

    def drop(self, sequence: int) -> None:
        """Remove a sequence; blocks that no other sequence reads are free again."""
        for block in self.tables.pop(sequence):
            self.readers[block] -= 1
            if not self.readers[block]:
                self.free.append(block)
        del self.lengths[sequence]

    @property
    def wasted_tokens(self) -> int:
        """Tokens for which the last blocks of all tables still have room."""
        # -9 % 4 = 3: three blocks of 4 tokens hold 9, and 3 more would fit
        return sum(-length % self.block_tokens for length in self.lengths.values())
