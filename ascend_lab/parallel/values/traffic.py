"""What was communicated: calls and bytes by group and operation."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Count:
    """Calls of one operation; bytes of the tensors given to it, and bytes a rank then sent.

    Both byte counts are of the busiest rank, added up over pipeline stages. The tensor is the input
    of all_reduce, reduce_scatter, all_to_all and send, the output of all_gather.
    """

    calls: int = 0
    size_bytes: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Traffic:
    """What was communicated: counts by (group, operation)."""

    counts: dict[tuple[str, str], Count] = field(default_factory=dict)

    def of(self, group: str, op: str) -> Count:
        """Return the count of an operation on a group; zeros if there was none."""
        return self.counts.get((group, op), Count())

    def note(self, group: str, op: str, size_bytes: int, sent_bytes: int) -> None:
        """Count one call."""
        count = self.counts.setdefault((group, op), Count())
        count.calls += 1
        count.size_bytes += size_bytes
        count.sent_bytes += sent_bytes

    def sent_bytes(self, group: str) -> int:
        """Return the bytes the busiest rank sent on a group, all operations together."""
        return sum(c.sent_bytes for (name, _), c in self.counts.items() if name == group)

    def __str__(self) -> str:
        """Return a table, one line an operation."""
        lines = [f"{'group':10}{'operation':16}{'calls':>6}{'tensor bytes':>14}{'sent bytes':>12}"]
        for (group, op), count in sorted(self.counts.items()):
            numbers = f"{count.calls:6}{count.size_bytes:14,}{count.sent_bytes:12,}"
            lines.append(f"{group:10}{op:16}{numbers}")
        return "\n".join(lines)
