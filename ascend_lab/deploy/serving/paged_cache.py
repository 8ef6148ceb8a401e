"""Paged cache of a language model's keys and values (Kwon et al., 2023, arXiv 2309.06180).

Keys and values of a sequence are stored in blocks of a fixed number of tokens, anywhere in memory.
The sequence's table lists its blocks in order. Sequences with a common prefix share blocks, and
each block counts its readers. A sequence that writes into a shared block gets a copy first.
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
    """Return the number of blocks for some tokens; the last block may be partly free."""
    # 130 tokens in blocks of 128 take 2 blocks.
    return -(-tokens // block_tokens)


@dataclass(slots=True)
class BlockCache:
    """Blocks with their numbers of readers, and the tables and lengths of all sequences."""

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
        # A stack: block 0 is taken first, and a freed block is the next to be taken.
        self.free = list(range(self.blocks))[::-1]
        self.readers = [0] * self.blocks

    def needs(self, sequence: int, tokens: int) -> int:
        """Return the number of free blocks that appending tokens takes, including a copy."""
        length = self.lengths.get(sequence, 0)
        # With 4 tokens a block, going from 6 to 7 tokens takes none, from 6 to 9 takes 3 - 2 = 1.
        new_blocks = blocks_of(length + tokens, self.block_tokens)
        new_blocks -= blocks_of(length, self.block_tokens)
        return new_blocks + (tokens > 0 and self._shares_last(sequence))

    def _shares_last(self, sequence: int) -> bool:
        """Return whether the next token goes into a block that other sequences read."""
        # After a full block, the next token begins a new block.
        tokens_in_last = self.lengths.get(sequence, 0) % self.block_tokens
        return bool(tokens_in_last) and self.readers[self.tables[sequence][-1]] > 1

    def append(self, sequence: int, tokens: int = 1) -> tuple[int, int] | None:
        """Reserve slots for more tokens of a sequence, which may be new.

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
        """Start a new sequence with the tokens of another, for example in beam search."""
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
        """Return the number of free slots in the last blocks of all tables."""
        # 9 tokens in three blocks of 4 leave -9 % 4 = 3 free slots.
        return sum(-length % self.block_tokens for length in self.lengths.values())
