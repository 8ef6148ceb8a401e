"""What the instructions of a pipe take, by their names."""

from collections import Counter

from ascend_lab.machine import sim


def cycles_by_instruction(timeline: sim.Timeline, pipe: str) -> dict[str, int]:
    """Return the cycles that a pipe spends in each kind of instruction, the longest first.

    Waits for flags and for other pipes are left out: only work is counted.
    """
    program = timeline.compiled
    record = sim.run_reference(program, record=True)[2]
    assert record is not None
    cycles = Counter[str]()
    for number, start, end in zip(record.step, record.start, record.end, strict=True):
        step = program.steps[number]
        name = program.sources[step.source].op
        is_work = name not in ("wait_flag", "set_flag", "barrier")
        if is_work and program.pipes[step.pipe] == pipe:
            cycles[name] += int(end - start)
    return dict(cycles.most_common())
