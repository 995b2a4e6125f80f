"""The plan as a table: what `--dry-run` prints."""

from __future__ import annotations

from dataclasses import dataclass, field

from rstar2_megatron.settings.planning.memory import Memory


@dataclass
class RunPlan:
    """The rows, notes and problems of a plan. Each problem has its operands and a remedy."""

    title: str
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    actor_memory: Memory | None = None
    num_engines: int = 0
    kv_capacity_tokens: int | None = None

    @property
    def fits(self) -> bool:
        return not self.problems

    def add(self, section: str, label: str, value: str) -> None:
        self.rows.append((section, label, value))

    def render(self) -> str:
        """An aligned text table, then notes and problems."""
        left = max((len(section) for section, _, _ in self.rows), default=0)
        middle = max((len(label) for _, label, _ in self.rows), default=0)
        lines = [self.title, "-" * len(self.title)]
        previous = ""
        for section, label, value in self.rows:
            shown = "" if section == previous else section
            lines.append(f"{shown:<{left}}  {label:<{middle}}  {value}")
            previous = section
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"DOES NOT FIT: {problem}" for problem in self.problems] or ["fits"]
        return "\n".join(lines)


def parameters_text(number: int) -> str:
    return f"{number / 1e9:.3g} B" if number >= 1e9 else f"{number / 1e6:.3g} M"


def gb_text(value: float) -> str:
    """Two decimals; three below 0.1 GB, for tiny models."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def ranges_text(ranks: list[int]) -> str:
    """0-3,6 for [0, 1, 2, 3, 6]."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in parts)
