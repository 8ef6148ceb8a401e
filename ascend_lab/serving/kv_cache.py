"""The paged cache of keys and values: block tables, shared blocks, a copy where one is written.

A sequence's cache lies in blocks of so many tokens, anywhere in memory; its table says where.
Sequences with a common start share blocks, each with a count of its readers. Who writes into a
shared block gets a copy first (Kwon et al., 2023, arXiv 2309.06180).
"""

from dataclasses import dataclass, field

from ascend_lab.errors import CapacityError, InputError


def token_bytes(layers: int, kv_heads: int, head_dim: int, element_bytes: int = 2) -> int:
    """Return the bytes of one token's keys and values: 2 * layers * heads * depth * bytes."""
    return 2 * layers * kv_heads * head_dim * element_bytes


def blocks_in(memory_bytes: float, block_tokens: int, bytes_of_token: int, cards: int = 1) -> int:
    """Return the blocks that a card's memory holds; heads are divided among `cards`.

    The rule of MindIE-LLM's user guide: floor(memory / (block * bytes of a token)).
    """
    return int(memory_bytes * cards // (block_tokens * bytes_of_token))


def blocks_of(tokens: int, block_tokens: int) -> int:
    """Return the blocks that some tokens take: the last one may have room left."""
    return -(-tokens // block_tokens)


@dataclass(slots=True)
class BlockCache:
    """Blocks, who reads each, and every sequence's table."""

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
        self.free, self.readers = list(range(self.blocks))[::-1], [0] * self.blocks

    def needs(self, sequence: int, tokens: int) -> int:
        """Return the free blocks that appending `tokens` takes, a copy included."""
        length = self.lengths.get(sequence, 0)
        more = blocks_of(length + tokens, self.block_tokens)
        more -= blocks_of(length, self.block_tokens)
        return more + (tokens > 0 and self._shares_last(sequence))

    def _shares_last(self, sequence: int) -> bool:
        open_block = self.lengths.get(sequence, 0) % self.block_tokens
        return bool(open_block) and self.readers[self.tables[sequence][-1]] > 1

    def append(self, sequence: int, tokens: int = 1) -> tuple[int, int] | None:
        """Make room for more tokens of a sequence, a new one too.

        Returns (from, to) if a block must be copied first. Raises `CapacityError`, and changes
        nothing, if too few blocks are free.
        """
        if (needed := self.needs(sequence, tokens)) > len(self.free):
            raise CapacityError(f"{needed} free blocks", str(len(self.free)), "preempt a sequence")
        table, copied = self.tables.setdefault(sequence, []), None
        if tokens > 0 and self._shares_last(sequence):
            copied = (table[-1], self.free.pop())
            self.readers[copied[0]] -= 1
            self.readers[copied[1]] = 1
            table[-1] = copied[1]
        length = self.lengths[sequence] = self.lengths.get(sequence, 0) + tokens
        while len(table) < blocks_of(length, self.block_tokens):
            table.append(self.free.pop())
            self.readers[table[-1]] = 1
        return copied

    def fork(self, parent: int, child: int) -> None:
        """Let a new sequence begin as another one stands: beams, or several answers."""
        if child in self.tables:
            raise InputError("a new sequence", str(child), "drop the old one first")
        self.tables[child], self.lengths[child] = list(self.tables[parent]), self.lengths[parent]
        for block in self.tables[child]:
            self.readers[block] += 1

    def drop(self, sequence: int) -> None:
        """Forget a sequence; blocks that nobody else reads are free again."""
        for block in self.tables.pop(sequence):
            self.readers[block] -= 1
            if not self.readers[block]:
                self.free.append(block)
        del self.lengths[sequence]

    @property
    def wasted_tokens(self) -> int:
        """Tokens that used blocks could hold and do not, each table's last block looked at."""
        return sum(-length % self.block_tokens for length in self.lengths.values())
