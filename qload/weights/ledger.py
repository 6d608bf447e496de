"""The coverage ledger: which tensors of a checkpoint were used, how often, and which need not be."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from qload.errors import ArgumentError


@dataclass(frozen=True)
class LoadReport:
    """What became of every tensor of a checkpoint.

    Attributes
    ----------
    used
        The names that loads have used, sorted.
    unused
        The names that no load has used and that were not exempted.
    twice
        How often, by name, of those that were used more than once.
    exempted
        The reason, by name, of those that may stay unused.
    notes
        What disagreed without harm, in the order in which it was noted.
    """

    used: Sequence[str]
    unused: Sequence[str]
    twice: Mapping[str, int]
    exempted: Mapping[str, str]
    notes: Sequence[str]

    @property
    def complete(self) -> bool:
        """Whether every tensor was used exactly once or exempted by name."""
        return not self.unused and not self.twice

    def __str__(self) -> str:
        lines = [
            f"{len(self.used)} used, {len(self.unused)} unused, {len(self.twice)} more than once, "
            f"{len(self.exempted)} exempted"
        ]
        lines += [f"  unused    {name}" for name in self.unused]
        lines += [f"  {times} times   {name}" for name, times in self.twice.items()]
        lines += [f"  exempted  {name}: {reason}" for name, reason in self.exempted.items()]
        lines += [f"  note      {text}" for text in self.notes]
        return "\n".join(lines)


@dataclass
class Ledger:
    """Entries of one `Weights`; a load that fails leaves none."""

    taken: Counter[str] = field(default_factory=Counter)
    exemptions: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def take(self, names: Iterable[str]) -> None:
        """One load used each of these tensors."""
        self.taken.update(set(names))

    def exempt(self, patterns: Iterable[str], reason: str) -> None:
        """Tensors of these names (`*` and `?` as in a shell) may stay unused, for this reason."""
        if not reason:
            raise ArgumentError("reason", "why these tensors may stay unused", "nothing")
        self.exemptions += [(pattern, reason) for pattern in patterns]

    def report(self, keys: Collection[str]) -> LoadReport:
        """Every stored tensor, accounted for."""
        unused = [key for key in sorted(keys) if not self.taken[key]]
        exempted = {key: reason for key in unused if (reason := self._reason(key))}
        return LoadReport(
            used=sorted(key for key in keys if self.taken[key]),
            unused=[key for key in unused if key not in exempted],
            twice={key: times for key, times in sorted(self.taken.items()) if times > 1},
            exempted=exempted,
            notes=tuple(self.notes),
        )

    def _reason(self, key: str) -> str | None:
        return next((reason for pattern, reason in self.exemptions if fnmatchcase(key, pattern)), None)
