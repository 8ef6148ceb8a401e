"""Figures of language models: where a step's time goes, and the frontier of plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from ascend_lab.lab.figures import style as st

if TYPE_CHECKING:
    from ascend_lab.llm import Plans, Step

COLOURS = (st.BLUE, st.SKY, st.VERMILLION, st.ORANGE, st.GREY, st.LIGHT, st.GREEN)
HATCHES = ("", "//", "", "\\\\", "", "..", "xx")


def fig_step_ledger(steps: Sequence[Step]) -> st.LabFigure:
    """Draw the ledger of several steps as stacked bars, one bar a step."""
    fig, ax = st.new_figure(height_in=3.0)
    names = [str(step.load.batch) for step in steps]
    bottoms = [0.0] * len(steps)
    for entry, colour, hatch in zip(steps[0].ledger, COLOURS, HATCHES, strict=True):
        heights = [1e3 * step.ledger[entry] for step in steps]
        look = {"color": colour, "hatch": hatch, "edgecolor": st.INK, "linewidth": 0.5}
        ax.bar(names, heights, bottom=bottoms, label=entry, **look)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    ax.set(xlabel="sequences in the batch", ylabel="time of a decode step (ms)")
    fig.legend(loc="outside upper center", ncols=len(COLOURS))
    summary = "; ".join(
        f"batch {step.load.batch} takes {1e3 * step.time_s:.1f} ms, of it weights "
        f"{step.ledger['weights'] / step.time_s:.0%} and cache "
        f"{step.ledger['cache'] / step.time_s:.0%}"
        for step in steps
    )
    return st.finish(fig, alt=f"Stacked bars of a decode step by batch: {summary}.")


def fig_step(batch: int = 16, context: int = 2048) -> st.LabFigure:
    """Draw the ledger of a decode step of Qwen3-8B on one 910B2, beside that of one sequence."""
    from ascend_lab import llm

    machine = llm.machine_of("Ascend910B2", "", llm.Plan())
    model = llm.Model(llm.load_decoder("qwen3_8b"), machine)
    return fig_step_ledger([model.time_step(llm.decode(b, context)) for b in sorted({1, batch})])


def fig_frontier(plans: Plans) -> st.LabFigure:
    """Draw tokens per second over the time of a step, for the plans that nothing beats."""
    fig, ax = st.new_figure(height_in=3.0)
    steps = plans.frontier
    times_ms = [1e3 * step.time_s for step in steps]
    rates = [step.tokens_per_s for step in steps]
    ax.step(times_ms, rates, where="post", color=st.GREY, linewidth=1)
    for tp in sorted({step.plan.tp for step in steps}):
        chosen = [step for step in steps if step.plan.tp == tp]
        ax.plot(
            [1e3 * step.time_s for step in chosen],
            [step.tokens_per_s for step in chosen],
            marker="os^Dv"[tp.bit_length() % 5],
            linestyle="none",
            label=f"tp {tp}",
        )
    ax.set(xlabel="time of a decode step (ms)", ylabel="tokens per second", yscale="log")
    # 200, 500 and 1,000 in place of 2 x 10^2 and the like
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.legend(loc="lower right")
    first = steps[0]
    last = steps[-1]
    alt = (
        f"A staircase of {len(steps)} plans from {times_ms[0]:.1f} ms and {rates[0]:.0f} tokens "
        f"per second ({first.plan}, batch {first.load.batch}) to {times_ms[-1]:.1f} ms and "
        f"{rates[-1]:.0f} ({last.plan}, batch {last.load.batch})."
    )
    return st.finish(fig, alt=alt)
