"""In which order a pipeline's stages run their forward and backward passes.

An order is a tuple of `Task`s for each stage. Any order in which nothing waits for itself gives
the same gradients; what differs is the idle time and how many micro-batches are held at once.
GPipe: Huang et al., 2019. 1F1B: Narayanan et al., "PipeDream", 2019. Interleaved: Narayanan et
al., "Efficient large-scale language model training on GPU clusters", 2021, section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from ascend_lab.errors import ClusterError


@dataclass(frozen=True, slots=True)
class Task:
    """A forward or backward pass of one micro-batch through one chunk of layers.

    Chunks are numbered along the model: chunk c lives on stage c modulo stages.
    """

    backward: bool
    micro: int
    chunk: int


Order = tuple[tuple[Task, ...], ...]


def gpipe(stages: int, micro_batches: int) -> Order:
    """Return all forward passes, then all backward passes in reverse."""
    micros = range(micro_batches)
    return tuple(
        (*(Task(False, m, s) for m in micros), *(Task(True, m, s) for m in reversed(micros)))
        for s in range(stages)
    )


def one_f_one_b(stages: int, micro_batches: int) -> Order:
    """Return `stages - s` forward passes on stage s, then one backward, one forward in turn.

    Stage s never holds more than stages - s micro-batches.
    """
    return tuple(
        _alternate(
            [Task(False, m, s) for m in range(micro_batches)],
            [Task(True, m, s) for m in range(micro_batches)],
            stages - s - 1,
        )
        for s in range(stages)
    )


def interleaved(stages: int, micro_batches: int, chunks: int) -> Order:
    """Return 1F1B where each stage has several chunks, run in turn for `stages` micro-batches each.

    Raises `ClusterError` unless micro-batches divide among the stages.
    """
    if micro_batches % stages:
        what = f"micro-batches divisible by {stages} stages for interleaving"
        raise ClusterError(what, str(micro_batches), "use a multiple")
    rows = range(stages)
    rounds = range(0, micro_batches, stages)

    def passes(s: int, backward: bool) -> list[Task]:
        turns = reversed(range(chunks)) if backward else range(chunks)
        order = list(turns)
        return [
            Task(backward, first + i, c * stages + s) for first in rounds for c in order for i in rows
        ]

    return tuple(
        _alternate(passes(s, False), passes(s, True), 2 * (stages - s - 1) + (chunks - 1) * stages)
        for s in rows
    )


def _alternate(forward: list[Task], backward: list[Task], ahead: int) -> tuple[Task, ...]:
    """Return `ahead` forward passes, then forward and backward in turn, then what is left."""
    ahead = min(ahead, len(forward))
    turns = len(forward) - ahead
    pairs = zip(forward[ahead:], backward[:turns], strict=True)
    return (*forward[:ahead], *(task for pair in pairs for task in pair), *backward[turns:])


def order_named(name: str, stages: int, micro_batches: int, chunks: int = 1) -> Order:
    """Return "gpipe", "1f1b" or "interleaved"; raise `ClusterError` for another name."""
    if micro_batches < 1 or chunks < 1:
        raise ClusterError("at least one micro-batch and chunk", f"{micro_batches}, {chunks}", "1")
    if name == "interleaved":
        return interleaved(stages, micro_batches, chunks)
    makers = {"gpipe": gpipe, "1f1b": one_f_one_b}
    if name not in makers:
        raise ClusterError("a schedule gpipe, 1f1b or interleaved", repr(name), "choose one")
    if chunks > 1:
        raise ClusterError(f"one chunk a stage for {name}", str(chunks), "use interleaved")
    return makers[name](stages, micro_batches)
