"""Simulates a scheduler of a language model's server: which requests read prompts or decode.

A step that reads p prompt tokens and decodes b requests with k cached tokens in all takes
`start_s + p prompt_token_s + b decode_s + k cached_token_s`. Every decoding request gets a token in
each step, and the end of a prompt gives the first one. Requests are served in order of arrival.

    static      a batch is read and decoded until its longest member ends; meanwhile none joins it
    prefill     prompts are read first whenever there is room (continuous batching; Orca, OSDI 2022)
    select      prompts are read once empty places have cost more time than reading would cost the
                decoding requests (supportSelectBatch of MindIE-LLM's scheduler)
    split       each step has a budget of tokens, for decodes first, then for parts of prompts
                (SplitFuse)

A place is room for one request in a step; there are `max_batch` of them.

Keys and values are stored in a `BlockCache`. When it is full, the latest requests are preempted:
they lose their blocks, and their prompts and answers are read again later.
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
    """The settings of the scheduler; the defaults are those of MindIE-LLM's config.json.

    The cache has `blocks` of `block_tokens` tokens. A step decodes up to `max_batch` requests, or
    reads up to `max_prefill_batch` prompts of `max_prefill_tokens` tokens together. The last two
    settings are the costs that "select" compares: of a prompt's delay for each decoding request,
    and of an empty place in a decoding step.
    """

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
    """A request: tokens of its prompt and of its output, produced tokens, and cached tokens.

    `first_s` and `end_s` are the times of its first and last token; -1 before that.
    """

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
        """Return the tokens to read before the next is produced: one in decoding, else a prompt.

        After a preemption, tokens that were produced already have to be read, too.
        """
        # A prompt of 5 tokens, 2 produced ones, and 6 cached ones: 5 + 2 - 6 = 1 to be read.
        return self.prompt + self.produced - self.cached

    @property
    def decodes(self) -> bool:
        """Tell whether the last produced token is the only one to be read."""
        return self.produced > 0 and self.unread == 1


@dataclass(slots=True)
class Conversation:
    """The answered requests, and counts of the steps that served them.

    With the policy "static", `places` counts the places of all decoding steps, and `idle_places`
    those whose request had ended. `wasted` has, for each step, the share of used blocks without a
    token.
    """

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
    """The state of the server between two steps; requests are numbered in order of arrival."""

    def __init__(self, requests: Sequence[Request], engine: Engine, time: StepTimer) -> None:
        self.engine = engine
        self.time = time
        self.log = Conversation(list(requests))
        self.future_requests = deque(sorted(requests, key=lambda request: request.arrival_s))
        for number, request in enumerate(self.future_requests):
            request.number = number
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.cache = BlockCache(engine.blocks, engine.block_tokens)
        self.now_s = 0.0
        # Policy "select": the milliseconds that empty places have cost since the last prompts.
        self.empty_place_cost_ms = 0.0
        # Policy "static": the number of requests in the batch when it began.
        self.static_batch = 0

    def run(self) -> Conversation:
        """Serve all requests, and return the log."""
        while self.future_requests or self.waiting or self.running:
            # Without requests, the clock jumps to the next arrival.
            if not (self.waiting or self.running):
                self.now_s = max(self.now_s, self.future_requests[0].arrival_s)
            while self.future_requests and self.future_requests[0].arrival_s <= self.now_s:
                self.waiting.append(self.future_requests.popleft())
            self._step()
        self.log.end_s = self.now_s
        return self.log

    def _step(self) -> None:
        """Choose the requests that read and those that decode, reserve blocks, advance the time."""
        engine = self.engine
        log = self.log
        decoding = [request for request in self.running if request.decodes]
        reads: list[tuple[Request, int]] = []
        if engine.policy == "split":
            decoding = self._grow_decoding(decoding)
            reads = self._choose_prompts(engine.max_prefill_tokens - len(decoding))
        else:
            if self.waiting and self._should_read_prompts(len(decoding)):
                reads = self._choose_prompts(engine.max_prefill_tokens)
                # A static batch keeps its size until its last member ends.
                self.static_batch = len(reads) or self.static_batch
            decoding = [] if reads else self._grow_decoding(decoding)
        prompt_tokens = sum(tokens for _, tokens in reads)
        computed_requests = len(decoding)
        if engine.policy == "static" and decoding:
            computed_requests = self.static_batch  # ended members are still computed
            log.places += self.static_batch
            log.idle_places += self.static_batch - len(decoding)
        # 200 places, 120 of them decoding: 80 * 50 ms are lost in this step
        self.empty_place_cost_ms += engine.decode_ms_per_request * (
            engine.max_batch - len(decoding)
        )
        self.now_s += self.time.seconds_of(
            prompt_tokens, computed_requests, sum(request.cached for request in decoding)
        )
        log.steps += 1
        log.prompt_tokens += prompt_tokens
        used_tokens = (engine.blocks - len(self.cache.free)) * engine.block_tokens
        # The share of used blocks that has no token.
        log.wasted.append(self.cache.wasted_tokens / used_tokens)
        for request in (*decoding, *(request for request, _ in reads if not request.unread)):
            self._give_token(request)

    def _give_token(self, request: Request) -> None:
        """Give a request its next token; after the last one, free its blocks."""
        request.produced += 1
        if request.produced == 1:
            request.first_s = self.now_s
        if request.produced == request.output:
            request.end_s = self.now_s
            self.running.remove(request)
            self.cache.drop(request.number)

    # -- requests that decode ----------------------------------------------------------------------
    def _grow_decoding(self, decoding: list[Request]) -> list[Request]:
        """Return the requests that get a token; the latest requests may be preempted."""
        served = []
        for request in sorted(decoding, key=lambda request: request.number):
            # An earlier request may have preempted this one.
            if request in self.running and self._try_grow(request, 1):
                served.append(request)
            elif request in self.running:
                self._preempt(request)
        return served

    def _try_grow(self, request: Request, tokens: int) -> bool:
        """Add tokens to a request, preempting later ones if needed; return whether they fit."""
        while self.cache.needs(request.number, tokens) > len(self.cache.free):
            newest = max(self.running, key=lambda running: running.number)
            if newest is request:
                return False
            self._preempt(newest)
        self.cache.append(request.number, tokens)
        request.cached += tokens
        return True

    def _preempt(self, request: Request) -> None:
        """Free a request's blocks, and put it first in the queue."""
        self.cache.drop(request.number)
        request.cached = 0
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.log.preemptions += 1

    # -- requests whose prompts are read -----------------------------------------------------------
    def _should_read_prompts(self, decoding: int) -> bool:
        """Return whether the next step reads waiting prompts instead of decoding."""
        if self.engine.policy == "static":
            return not self.running
        if self.engine.policy == "prefill" or not decoding:
            return True
        # Reading prompts delays all decoding requests: 20 of them lose 20 * 150 ms.
        if self.engine.prefill_ms_per_request * decoding > self.empty_place_cost_ms:
            return False
        self.empty_place_cost_ms = 0.0
        return True

    def _fits(self, request: Request, tokens: int) -> bool:
        """Return whether a waiting request may begin without preempting others."""
        if len(self.running) >= self.engine.max_batch:
            return False
        if self.engine.policy == "static":  # answers must fit as well, as nobody is preempted
            size = self.engine.block_tokens
            ends = [
                blocks_of(member.prompt + member.output, size)
                for member in (*self.running, request)
            ]
            return sum(ends) <= self.engine.blocks
        # One block is reserved for each running request, which may need it for its next token.
        return self.cache.needs(request.number, tokens) + len(self.running) <= len(self.cache.free)

    def _choose_prompts(self, budget: int) -> list[tuple[Request, int]]:
        """Fill a step with prompts up to a budget of tokens; return each with its tokens.

        Prompts are read as a whole; a prompt longer than the budget is read alone in its step. With
        "split" they are read in parts, and prompts that were begun come first.
        """
        reads: list[tuple[Request, int]] = []
        split = self.engine.policy == "split"
        max_requests = self.engine.max_prefill_batch
        partly_read = [
            request for request in self.running if split and request.unread and not request.decodes
        ]
        for request in sorted(partly_read, key=lambda request: request.number):
            tokens = min(request.unread, budget)
            if tokens > 0 and request in self.running and self._try_grow(request, tokens):
                reads.append((request, tokens))
                budget -= tokens
        while self.waiting and budget > 0 and (split or len(reads) < max_requests):
            request = self.waiting[0]
            tokens = min(request.unread, budget) if split else request.unread
            if (tokens > budget and reads) or not self._fits(request, tokens):
                break
            self.running.append(self.waiting.popleft())
            self._try_grow(request, tokens)
            reads.append((request, tokens))
            budget -= tokens
        return reads


def converse(requests: Sequence[Request], engine: Engine, time: StepTimer) -> Conversation:
    """Simulate the serving of some requests, and return the log with copies of them.

    Raises `InputError` for an unknown policy, and for a request whose cache can never fit.
    """
    if engine.policy not in POLICIES:
        raise InputError(f"a policy among {', '.join(POLICIES)}", repr(engine.policy))
    for request in requests:
        if min(request.prompt, request.output) < 1:
            raise InputError(
                "prompts and answers of at least a token", f"{request.prompt}, {request.output}"
            )
        size = blocks_of(request.prompt + request.output, engine.block_tokens)
        if size > engine.blocks:
            needed = f"requests of at most {engine.blocks} blocks of {engine.block_tokens} tokens"
            raise InputError(needed, str(size), "add memory")
    if not requests or min(engine.max_batch, engine.max_prefill_tokens) < 1:
        raise InputError("requests, and room for one in a step", "none", "raise the limits")
    return _Scheduler([replace(request) for request in requests], engine, time).run()
