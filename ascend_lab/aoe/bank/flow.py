"""Hit, miss, repeat: what to do with a problem, and how the report counts what was done.

| asked before | `REPEAT_TUNE` | done | counted in |
|---|---|---|---|
| hit | no | use the entry | `repo_hit_num` |
| hit | yes, better found | written to the custom bank | `repo_update_num` |
| hit | yes, nothing better | the entry stays | `repo_reserved_num` |
| miss | better than the default | written to the custom bank | `repo_add_num` |
| miss | nothing better | the default itself is written | `repo_unsatisfied_num` |

The published tool writes no record in the last case and searches again next time. Here the entry
says that the default is the best known (`improved` is False, `proven` if that is certain), so that
a second run is a hit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ascend_lab.aoe.bank.knowledge import OUTCOMES, Knowledge, Origin, Outcome
from ascend_lab.aoe.bank.records import BankEntry, BankKey
from ascend_lab.errors import InputError


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to tune, and what the banks hold (None on a miss)."""

    tune: bool
    entry: BankEntry | None
    origin: Origin | None


def decide(knowledge: Knowledge, key: BankKey, repeat: bool = False) -> Decision:
    """Look the problem up, custom bank first: tune on a miss, or always if `repeat`."""
    found = knowledge.find(key)
    entry, origin = found or (None, None)
    return Decision(entry is None or repeat, entry, origin)


def settle(knowledge: Knowledge, decision: Decision, tuned: BankEntry | None = None) -> Outcome:
    """Write what tuning found, if it is worth it, and return how to count the problem.

    `tuned` is None if the entry of the bank was used. It never makes the custom bank worse, nor
    puts there what the built-in bank already holds.
    """
    if tuned is None:
        if decision.entry is None:
            raise InputError("a tuned entry", "none, and none in the bank", "tune on a miss")
        return "hit"
    if not tuned.better_than(decision.entry):
        return "reserved"
    written = knowledge.keep(tuned)
    if written == "reserved":  # another process was faster and better
        return "reserved"
    if decision.entry is not None:
        return "update"
    return "add" if tuned.improved else "unsatisfied"


def repo_summary(outcomes: Iterable[Outcome]) -> Mapping[str, int]:
    """Count outcomes under the field names of the published report, and in `total_num`."""
    seen = list(outcomes)
    counts = {f"repo_{name}_num": seen.count(name) for name in OUTCOMES}
    return {**counts, "total_num": len(seen)}
