"""A rank's tensors while experts are loaded: facts are read once, and the ledger is told at the end."""

from collections.abc import Iterable

from torch import Tensor

from qload.loader import TensorSource
from qload.loader.source import WrappedSource, fill
from qload.parallel import ProcessGroup
from qload.spec import Role


class ExpertSource(WrappedSource):
    """What an inner source holds, for the ranks of a `group` that cut the same experts.

    Until `begin` what is read whole is a fact of an expert, and kept. What a load has used, and what it has
    to note, is entered into the ledger by `end`: a load that fails leaves nothing there.
    """

    def __init__(self, inner: TensorSource, group: ProcessGroup) -> None:
        super().__init__(inner)
        self.process_group = group
        self._facts: dict[str, Tensor] | None = {}
        self._kept: dict[str, Tensor] = {}
        self._taken: list[str] = []
        self._notes: dict[str, None] = {}

    def begin(self, names: Iterable[str]) -> None:
        """Facts are known: of those called `names` they are kept until they are read, and no longer."""
        known = self._facts or {}
        self._kept = {name: known[name] for name in names if name in known}
        self._facts = None

    def end(self) -> None:
        """Enter into the ledger what was used and noted, each once."""
        self.inner.take(self._taken)
        for note in self._notes:
            self.inner.note(note)

    def read(self, name: str, index: tuple[slice, ...] = (), *, role: Role) -> Tensor:
        """As the inner source, or what was read before."""
        if self._facts is not None:
            fact = self.inner.read(name, index, role=role)
            self._facts[name] = fact
            return fact
        if not index and name in self._kept:
            return self._kept.pop(name)
        return self.inner.read(name, index, role=role)

    def read_into(self, name: str, index: tuple[slice, ...], out: Tensor, *, role: Role) -> None:
        """As the inner source."""
        fill(self.inner, name, index, out, role)

    def take(self, names: Iterable[str]) -> None:
        """Kept until the end."""
        self._taken += names

    def note(self, text: str) -> None:
        """Kept until the end."""
        self._notes[text] = None
