"""A language model being served, step by step, and the paged cache of its keys and values.

A step that reads p prompt tokens and decodes b requests with k cached tokens in all takes
`start_s + p prompt_token_s + b decode_s + k cached_token_s`. Every request that decodes gets a
token a step; a prompt read to its end gives the first. Requests are taken in order of arrival.

    static      a batch is read, then decoded until its longest member ends; nobody joins
    prefill     prompts first whenever there is room (continuous batching; Orca, OSDI 2022)
    select      prompts when those that decode have waited less than empty places have cost
                (supportSelectBatch of MindIE-LLM's scheduler)
    split       each step has a budget of tokens: decodes first, then parts of prompts (SplitFuse)

A sequence's keys and values lie in blocks of so many tokens, anywhere in memory; its table says
where. Sequences with a common start share blocks, each with a count of its readers. Who writes into
a shared block gets a copy first (Kwon et al., 2023, arXiv 2309.06180).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ascend_lab.deploy.serving.model import StepTimer
from ascend_lab.deploy.serving.simulate import latencies
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
        self.free = list(range(self.blocks))[::-1]
        self.readers = [0] * self.blocks

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
        table = self.tables.setdefault(sequence, [])
        copied = None
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
        self.tables[child] = list(self.tables[parent])
        self.lengths[child] = self.lengths[parent]
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


POLICIES = ("static", "prefill", "select", "split")


@dataclass(frozen=True, slots=True)
class Engine:
    """How requests are scheduled; the defaults are those of MindIE-LLM's config.json."""

    policy: str = "prefill"
    blocks: int = 1024
    block_tokens: int = 128
    max_batch: int = 200
    max_prefill_batch: int = 50
    max_prefill_tokens: int = 8192
    prefill_ms_per_request: float = 150.0
    decode_ms_per_request: float = 50.0


@dataclass(slots=True)
class Request:
    """A prompt and the tokens it will get; so many are given, so many stand in the cache."""

    arrival_s: float
    prompt: int
    output: int
    number: int = 0
    given: int = 0
    cached: int = 0
    first_s: float = -1.0
    end_s: float = -1.0

    @property
    def unread(self) -> int:
        """Tokens to be read before the next is given: one while it decodes, else a prompt.

        After a preemption the prompt includes what was given already.
        """
        return self.prompt + self.given - self.cached

    @property
    def decodes(self) -> bool:
        """Tell whether the last token given is all that is unread."""
        return self.given > 0 and self.unread == 1


@dataclass(slots=True)
class Conversation:
    """What became of the requests, and what the steps did."""

    requests: list[Request]
    end_s: float = 0.0
    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    places: int = 0
    idle_places: int = 0
    wasted: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, object]:
        """Return the numbers as plain data: seconds to the first token and between tokens."""
        done = self.requests
        gaps = [(one.end_s - one.first_s) / (one.output - 1) for one in done if one.output > 1]
        return {
            "tokens_per_s": sum(one.output for one in done) / self.end_s,
            "first_token_s": latencies(np.array([one.first_s - one.arrival_s for one in done])),
            "between_tokens_s": latencies(np.array(gaps)),
            "latency_s": latencies(np.array([one.end_s - one.arrival_s for one in done])),
            "steps": self.steps,
            "preemptions": self.preemptions,
            "prompt_tokens_read": self.prompt_tokens,
            "idle_places": self.idle_places / self.places if self.places else 0.0,
            "wasted_cache": float(np.mean(self.wasted)),
        }


class _Scheduler:
    """The state between two steps; requests have numbers in order of arrival."""

    def __init__(self, requests: Sequence[Request], engine: Engine, time: StepTimer) -> None:
        self.engine = engine
        self.time = time
        self.log = Conversation(list(requests))
        self.coming = deque(sorted(requests, key=lambda one: one.arrival_s))
        for number, one in enumerate(self.coming):
            one.number = number
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.cache = BlockCache(engine.blocks, engine.block_tokens)
        self.now = self.waste = 0.0
        self.places = 0

    def run(self) -> Conversation:
        while self.coming or self.waiting or self.running:
            if not (self.waiting or self.running):
                self.now = max(self.now, self.coming[0].arrival_s)
            while self.coming and self.coming[0].arrival_s <= self.now:
                self.waiting.append(self.coming.popleft())
            self._step()
        self.log.end_s = self.now
        return self.log

    def _step(self) -> None:
        """Choose who reads and who decodes, make room, and let the time pass."""
        engine = self.engine
        log = self.log
        decoding = [one for one in self.running if one.decodes]
        reads: list[tuple[Request, int]] = []
        if engine.policy == "split":
            decoding = self._decode(decoding)
            reads = self._read(engine.max_prefill_tokens - len(decoding))
        else:
            if self.waiting and self._prompts_next(len(decoding)):
                reads = self._read(engine.max_prefill_tokens)
                self.places = len(reads) or self.places
            decoding = [] if reads else self._decode(decoding)
        tokens = sum(tokens for _, tokens in reads)
        computed = len(decoding)
        if engine.policy == "static" and decoding:
            computed = self.places  # those that ended are computed along
            log.places += self.places
            log.idle_places += self.places - len(decoding)
        self.waste += engine.decode_ms_per_request * (engine.max_batch - len(decoding))
        self.now += self.time.of(tokens, computed, sum(one.cached for one in decoding))
        log.steps += 1
        log.prompt_tokens += tokens
        held = (engine.blocks - len(self.cache.free)) * engine.block_tokens
        log.wasted.append(self.cache.wasted_tokens / held)
        for one in (*decoding, *(one for one, _ in reads if not one.unread)):
            self._token(one)

    def _token(self, one: Request) -> None:
        one.given += 1
        if one.given == 1:
            one.first_s = self.now
        if one.given == one.output:
            one.end_s = self.now
            self.running.remove(one)
            self.cache.drop(one.number)

    # -- who decodes -------------------------------------------------------------------------------
    def _decode(self, decoding: list[Request]) -> list[Request]:
        """Return who gets a token: the last that came make room, and are read again later."""
        kept = []
        for one in sorted(decoding, key=lambda one: one.number):
            if one in self.running and self._grows(one, 1):
                kept.append(one)
            elif one in self.running:
                self._preempt(one)
        return kept

    def _grows(self, one: Request, tokens: int) -> bool:
        """Add tokens, preempting who came after until they fit; False if they never do."""
        while self.cache.needs(one.number, tokens) > len(self.cache.free):
            last = max(self.running, key=lambda other: other.number)
            if last is one:
                return False
            self._preempt(last)
        self.cache.append(one.number, tokens)
        one.cached += tokens
        return True

    def _preempt(self, one: Request) -> None:
        self.cache.drop(one.number)
        one.cached = 0
        self.running.remove(one)
        self.waiting.appendleft(one)
        self.log.preemptions += 1

    # -- who reads ---------------------------------------------------------------------------------
    def _prompts_next(self, decoding: int) -> bool:
        """Tell whether waiting prompts come before the next tokens."""
        if self.engine.policy == "static":
            return not self.running
        if self.engine.policy == "prefill" or not decoding:
            return True
        if self.engine.prefill_ms_per_request * decoding > self.waste:
            return False
        self.waste = 0.0
        return True

    def _fits(self, one: Request, tokens: int) -> bool:
        """Tell whether a waiting request may begin: its blocks, and one for each that runs."""
        if len(self.running) >= self.engine.max_batch:
            return False
        if self.engine.policy == "static":  # all of their answers will fit: nobody is preempted
            size = self.engine.block_tokens
            ends = [blocks_of(r.prompt + r.output, size) for r in (*self.running, one)]
            return sum(ends) <= self.engine.blocks
        return self.cache.needs(one.number, tokens) + len(self.running) <= len(self.cache.free)

    def _read(self, left: int) -> list[tuple[Request, int]]:
        """Fill a step with prompts: whole ones, a long one alone; or parts, those begun first."""
        reads: list[tuple[Request, int]] = []
        split = self.engine.policy == "split"
        most = self.engine.max_prefill_batch
        begun = [one for one in self.running if split and one.unread and not one.decodes]
        for one in sorted(begun, key=lambda one: one.number):
            tokens = min(one.unread, left)
            if tokens > 0 and one in self.running and self._grows(one, tokens):
                reads.append((one, tokens))
                left -= tokens
        while self.waiting and left > 0 and (split or len(reads) < most):
            one = self.waiting[0]
            tokens = min(one.unread, left) if split else one.unread
            if (tokens > left and reads) or not self._fits(one, tokens):
                break
            self.running.append(self.waiting.popleft())
            self._grows(one, tokens)
            reads.append((one, tokens))
            left -= tokens
        return reads


def converse(requests: Sequence[Request], engine: Engine, time: StepTimer) -> Conversation:
    """Return what becomes of requests; those given stay as they are.

    Raises `InputError` for an unknown policy, and for a request whose cache can never fit.
    """
    if engine.policy not in POLICIES:
        raise InputError(f"a policy among {', '.join(POLICIES)}", repr(engine.policy))
    for one in requests:
        if min(one.prompt, one.output) < 1:
            raise InputError(
                "prompts and answers of at least a token", f"{one.prompt}, {one.output}"
            )
        if (size := blocks_of(one.prompt + one.output, engine.block_tokens)) > engine.blocks:
            needed = f"requests of at most {engine.blocks} blocks of {engine.block_tokens} tokens"
            raise InputError(needed, str(size), "add memory")
    if not requests or min(engine.max_batch, engine.max_prefill_tokens) < 1:
        raise InputError("requests, and room for one in a step", "none", "raise the limits")
    return _Scheduler([replace(one) for one in requests], engine, time).run()
