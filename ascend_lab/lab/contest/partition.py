"""Which sets of operations may be subgraphs, and in which order they run; sets are bit masks."""

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from ascend_lab.lab.contest.problem import Problem

Partition = tuple[int, ...]
WINDOW = 16
"""How many groups an order looks past the first that can run, for one that reads what is there."""
DEEP = 0.8
"""How often a random order goes on from the last operation."""


def bits(mask: int) -> Iterator[int]:
    """Yield the numbers of the set bits, smallest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class Relations:
    """The edges of a problem as bit masks over operations.

    `readers` and `makers` are direct neighbours, `after` and `before` all that are reachable.
    `touching` share a tensor; `beside` are direct neighbours and, where many operations read one
    input, the next of them.
    """

    def __init__(self, problem: Problem) -> None:
        """Read the edges of a problem."""
        count = len(problem.operations)
        self.problem = problem
        self.everything = (1 << count) - 1
        self.readers, self.makers = [0] * count, [0] * count
        self.before, self.after = [0] * count, [0] * count
        self.touching, self.beside = [0] * count, [0] * count
        for tensor, users in problem.consumers.items():
            group = sum(1 << user for user in users)
            for user, other in pairwise(users):
                self._join(user, other)
            if tensor in problem.producer:
                maker = problem.producer[tensor]
                self.readers[maker] |= group
                group |= 1 << maker
                for user in users:
                    self.makers[user] |= 1 << maker
                    self._join(user, maker)
            for op in bits(group):
                self.touching[op] |= group & ~(1 << op)
        for op in problem.order:
            for maker in bits(self.makers[op]):
                self.before[op] |= self.before[maker] | 1 << maker
        for op in reversed(problem.order):
            for reader in bits(self.readers[op]):
                self.after[op] |= self.after[reader] | 1 << reader
        self.results = sum(1 << op for op, readers in enumerate(self.readers) if not readers)
        self._ends: dict[int, tuple[int, int]] = {}

    def _join(self, one: int, other: int) -> None:
        self.beside[one] |= 1 << other
        self.beside[other] |= 1 << one

    def random_order(self, rng: random.Random) -> list[int]:
        """Return a random topological order that goes on from the last operation where it can."""
        made, found = 0, list[int]()
        waiting = set(range(len(self.makers)))
        while waiting:
            free = sorted(op for op in waiting if not self.makers[op] & ~made)
            near = [op for op in free if found and self.beside[op] >> found[-1] & 1]
            op = rng.choice(near if near and rng.random() < DEEP else free)
            waiting.remove(op)
            found.append(op)
            made |= 1 << op
        return found

    def closed(self, group: int) -> bool:
        """Return whether every result is read only inside or only outside the group."""
        for op in bits(group):
            inside = self.readers[op] & group
            if inside and inside != self.readers[op]:
                return False
        return True

    def connected(self, group: int) -> bool:
        """Return whether shared tensors join all operations of the group."""
        return len(self.components(group)) == 1

    def components(self, group: int) -> list[int]:
        """Return the parts of a group that shared tensors join."""
        parts = []
        while group:
            part, fresh = 0, group & -group
            while fresh:
                part |= fresh
                wide = 0
                for op in bits(fresh):
                    wide |= self.touching[op]
                fresh = wide & group & ~part
            parts.append(part)
            group &= ~part
        return parts

    def hull(self, group: int) -> int:
        """Return the least closed set with all paths between its operations that holds a group."""
        while True:
            before = after = 0
            for op in bits(group):
                before |= self.before[op]
                after |= self.after[op]
            grown = group | (before & after)
            for op in bits(grown):
                if self.readers[op] & grown:
                    grown |= self.readers[op]
            if grown == group:
                return group
            group = grown

    def ends(self, group: int) -> tuple[int, int]:
        """Return the operations outside that a group reads from, and those whose results it leaves.

        It leaves a result that no operation inside reads.
        """
        if group not in self._ends:
            needs = leaves = 0
            for op in bits(group):
                needs |= self.makers[op]
                if not self.readers[op] & group:
                    leaves |= 1 << op
            self._ends[group] = (needs & ~group, leaves)
        return self._ends[group]

    def order(self, groups: Iterable[int]) -> list[int] | None:
        """Return the groups so that each finds its operands made, or None when that cannot be.

        A group whose operand was made just before goes first, so that it may stay resident.
        """
        rank = self.problem.rank
        waiting = sorted(set(groups), key=lambda group: max(rank[op] for op in bits(group)))
        found: list[int] = []
        made = last = 0
        while waiting:
            chosen = looked = 0
            for group in waiting:
                needs = self.ends(group)[0]
                if not needs & ~made and (not chosen or needs & last):
                    chosen = group
                    if needs & last:
                        break
                looked += bool(chosen)
                if looked > WINDOW:
                    break
            if not chosen:
                return None
            found.append(chosen)
            waiting.remove(chosen)
            last = self.ends(chosen)[1]
            made |= last
        return found

    def covers(self, groups: Sequence[int]) -> bool:
        """Return whether the groups run every operation and leave every result of the graph."""
        done = stored = 0
        for group in groups:
            done |= group
            stored |= self.ends(group)[1]
        return done == self.everything and not self.results & ~stored
