"""A language model being served, step by step: which requests read their prompts, which decode.

A step that reads p prompt tokens and decodes b requests with k cached tokens in all takes
`start_s + p prompt_token_s + b decode_s + k cached_token_s`. Every request that decodes gets a
token in each step; a prompt read to its end gives the first. Requests are taken in order of
arrival.

    static      a batch is read, then decoded until its longest member ends; nobody joins
    prefill     prompts first whenever there is room (continuous batching; Orca, OSDI 2022)
    select      prompts when those that decode have waited less than empty places have cost
                (supportSelectBatch of MindIE-LLM's scheduler)
    split       each step has a budget of tokens: decodes first, then parts of prompts (SplitFuse)

Keys and values lie in a `BlockCache`. When it is full, requests that came last are preempted: they
lose their blocks, and their prompts and answers are read again later.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ascend_lab.deploy.serving.model import StepTimer
from ascend_lab.deploy.serving.paged_cache import BlockCache, blocks_of
from ascend_lab.deploy.serving.simulate import latencies
from ascend_lab.errors import InputError

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
    """A request: tokens of its prompt and answer, those produced so far, those in the cache."""

    arrival_s: float
    prompt: int
    output: int
    number: int = 0
    produced: int = 0
    cached: int = 0
    first_s: float = -1.0
    end_s: float = -1.0

    @property
    def unread(self) -> int:
        """Tokens to be read before the next one is produced: one while it decodes, else a prompt.

        After a preemption the prompt includes the tokens that were produced already.
        """
        # a prompt of 5 is in the cache, 2 tokens are produced, the last of them unread: 5 + 2 - 6
        return self.prompt + self.produced - self.cached

    @property
    def decodes(self) -> bool:
        """Tell whether the last token produced is the only one unread."""
        return self.produced > 0 and self.unread == 1


@dataclass(slots=True)
class Conversation:
    """The requests after their answers, and counts of the steps that served them."""

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
        requests = self.requests
        gaps = [
            (request.end_s - request.first_s) / (request.output - 1)
            for request in requests
            if request.output > 1
        ]
        return {
            "tokens_per_s": sum(request.output for request in requests) / self.end_s,
            "first_token_s": latencies(
                np.array([request.first_s - request.arrival_s for request in requests])
            ),
            "between_tokens_s": latencies(np.array(gaps)),
            "latency_s": latencies(
                np.array([request.end_s - request.arrival_s for request in requests])
            ),
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
        self.coming = deque(sorted(requests, key=lambda request: request.arrival_s))
        for number, request in enumerate(self.coming):
            request.number = number
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.cache = BlockCache(engine.blocks, engine.block_tokens)
        self.now = 0.0
        # of the policy "select": milliseconds that empty places have cost since the last prompts
        self.waste = 0.0
        # of the policy "static": requests in the batch when it began
        self.places = 0

    def run(self) -> Conversation:
        """Serve all requests, and return what became of them."""
        while self.coming or self.waiting or self.running:
            # with nothing to do the clock jumps to the next arrival
            if not (self.waiting or self.running):
                self.now = max(self.now, self.coming[0].arrival_s)
            while self.coming and self.coming[0].arrival_s <= self.now:
                self.waiting.append(self.coming.popleft())
            self._step()
        self.log.end_s = self.now
        return self.log

    def _step(self) -> None:
        """Choose which requests read and which decode, make room, and let the time pass."""
        engine = self.engine
        log = self.log
        decoding = [request for request in self.running if request.decodes]
        reads: list[tuple[Request, int]] = []
        if engine.policy == "split":
            decoding = self._decode(decoding)
            reads = self._read(engine.max_prefill_tokens - len(decoding))
        else:
            if self.waiting and self._prompts_next(len(decoding)):
                reads = self._read(engine.max_prefill_tokens)
                # a batch of the policy "static" keeps its places until its last member ends
                self.places = len(reads) or self.places
            decoding = [] if reads else self._decode(decoding)
        tokens = sum(tokens for _, tokens in reads)
        computed = len(decoding)
        if engine.policy == "static" and decoding:
            computed = self.places  # those that ended are computed along
            log.places += self.places
            log.idle_places += self.places - len(decoding)
        # 200 places, 120 of them decoding: 80 * 50 ms are lost in this step
        self.waste += engine.decode_ms_per_request * (engine.max_batch - len(decoding))
        self.now += self.time.of(tokens, computed, sum(request.cached for request in decoding))
        log.steps += 1
        log.prompt_tokens += tokens
        used_tokens = (engine.blocks - len(self.cache.free)) * engine.block_tokens
        # the share of the blocks in use that holds no token
        log.wasted.append(self.cache.wasted_tokens / used_tokens)
        for request in (*decoding, *(request for request, _ in reads if not request.unread)):
            self._token(request)

    def _token(self, request: Request) -> None:
        """Give a request its next token; after the last one its blocks are free."""
        request.produced += 1
        if request.produced == 1:
            request.first_s = self.now
        if request.produced == request.output:
            request.end_s = self.now
            self.running.remove(request)
            self.cache.drop(request.number)

    # -- who decodes -------------------------------------------------------------------------------
    def _decode(self, decoding: list[Request]) -> list[Request]:
        """Return the requests that get a token; those that came last may have to make room."""
        served = []
        for request in sorted(decoding, key=lambda request: request.number):
            # making room for an earlier request may have preempted this one meanwhile
            if request in self.running and self._grows(request, 1):
                served.append(request)
            elif request in self.running:
                self._preempt(request)
        return served

    def _grows(self, request: Request, tokens: int) -> bool:
        """Add tokens, preempting later requests until they fit; return False if they never do."""
        while self.cache.needs(request.number, tokens) > len(self.cache.free):
            newest = max(self.running, key=lambda running: running.number)
            if newest is request:
                return False
            self._preempt(newest)
        self.cache.append(request.number, tokens)
        request.cached += tokens
        return True

    def _preempt(self, request: Request) -> None:
        """Take a request's blocks away, and put it first in the queue."""
        self.cache.drop(request.number)
        request.cached = 0
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.log.preemptions += 1

    # -- who reads ---------------------------------------------------------------------------------
    def _prompts_next(self, decoding: int) -> bool:
        """Tell whether the next step reads waiting prompts rather than decodes."""
        if self.engine.policy == "static":
            return not self.running
        if self.engine.policy == "prefill" or not decoding:
            return True
        # reading prompts holds up all that decode: 20 of them lose 20 * 150 ms
        if self.engine.prefill_ms_per_request * decoding > self.waste:
            return False
        self.waste = 0.0
        return True

    def _fits(self, request: Request, tokens: int) -> bool:
        """Tell whether a waiting request may begin without taking blocks that others need."""
        if len(self.running) >= self.engine.max_batch:
            return False
        if self.engine.policy == "static":  # all of their answers will fit: nobody is preempted
            size = self.engine.block_tokens
            ends = [
                blocks_of(member.prompt + member.output, size)
                for member in (*self.running, request)
            ]
            return sum(ends) <= self.engine.blocks
        # one block for each running request, which may need it at its next token
        return self.cache.needs(request.number, tokens) + len(self.running) <= len(self.cache.free)

    def _read(self, budget: int) -> list[tuple[Request, int]]:
        """Fill a step with prompts up to a budget of tokens; return each with its tokens.

        Prompts are read whole, one above the budget alone; with "split" in parts, begun ones first.
        """
        reads: list[tuple[Request, int]] = []
        split = self.engine.policy == "split"
        max_requests = self.engine.max_prefill_batch
        begun = [
            request for request in self.running if split and request.unread and not request.decodes
        ]
        for request in sorted(begun, key=lambda request: request.number):
            tokens = min(request.unread, budget)
            if tokens > 0 and request in self.running and self._grows(request, tokens):
                reads.append((request, tokens))
                budget -= tokens
        while self.waiting and budget > 0 and (split or len(reads) < max_requests):
            request = self.waiting[0]
            tokens = min(request.unread, budget) if split else request.unread
            if (tokens > budget and reads) or not self._fits(request, tokens):
                break
            self.running.append(self.waiting.popleft())
            self._grows(request, tokens)
            reads.append((request, tokens))
            budget -= tokens
        return reads


def converse(requests: Sequence[Request], engine: Engine, time: StepTimer) -> Conversation:
    """Serve copies of some requests, and return what becomes of them.

    Raises `InputError` for an unknown policy, and for a request whose cache can never fit.
    """
    if engine.policy not in POLICIES:
        raise InputError(f"a policy among {', '.join(POLICIES)}", repr(engine.policy))
    for request in requests:
        if min(request.prompt, request.output) < 1:
            raise InputError(
                "prompts and answers of at least a token", f"{request.prompt}, {request.output}"
            )
        if (
            size := blocks_of(request.prompt + request.output, engine.block_tokens)
        ) > engine.blocks:
            needed = f"requests of at most {engine.blocks} blocks of {engine.block_tokens} tokens"
            raise InputError(needed, str(size), "add memory")
    if not requests or min(engine.max_batch, engine.max_prefill_tokens) < 1:
        raise InputError("requests, and room for one in a step", "none", "raise the limits")
    return _Scheduler([replace(request) for request in requests], engine, time).run()
