"""Coverage: a checkpoint's bytes by explanation, and the error for unread tensors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from qload.checkpoint.layer_index import LayerIndex
from qload.errors import QloadError, UnreadTensorsError, UnsupportedFormatError
from qload.errors.reporting import cause_of
from qload.formats.unquantized import FLOATS
from qload.loader import LayerDescription
from qload.storage import TensorInfo
from qload.weights import LoadReport, Weights
from qload.weights.exemptions import unread_reason


@dataclass(frozen=True)
class Coverage:
    """Bytes of a checkpoint by explanation; the five parts add up to `total`.

    Attributes
    ----------
    layers
        Number of readable layers, including plain ones.
    plain_tensors
        Number of plain tensors: of plain layers, biases, and single parameters.
    total
        Bytes of all tensors.
    read
        Bytes of tensors in layers, and of plain tensors.
    exempt
        Bytes of tensors outside of layers without effect on weights, by reason.
    unread
        Bytes of tensors without a supported format: layers in an unsupported dialect, and stacks of quantized
        experts in an unknown layout.
    refused
        Bytes of unreadable layers; each layer is a finding.
    unexplained
        Bytes of unexplained tensors; each tensor is a finding.
    """

    layers: int
    plain_tensors: int
    total: int
    read: int
    exempt: Mapping[str, int]
    unread: int
    refused: int
    unexplained: int

    @property
    def explained(self) -> int:
        """Bytes that are read or exempt."""
        return self.read + sum(self.exempt.values())


@dataclass(frozen=True)
class Account:
    """State of each tensor in the ledger of loads, and coverage in bytes.

    `unexplained`: tensor name -> its layer. `unread_bytes`: bytes of each unread tensor. `modules`: unread
    layers, and modules of experts with unread stacks.
    """

    report: LoadReport
    coverage: Coverage
    unexplained: Mapping[str, LayerDescription | None]
    unread_bytes: Mapping[str, int]
    modules: frozenset[str]

    def notes(self) -> list[str]:
        """Notes on unread tensors, one for each cause: their number, the first, the reason, their bytes."""
        causes: dict[str, list[str]] = {}
        members: dict[str, list[str]] = {}
        for name in self.report.unread:
            members.setdefault(self._module(name), []).append(name)
        for module, names in members.items():
            for name in names:
                cause = cause_of(self.report.unread[name], module, *names)
                causes.setdefault(cause, []).append(name)
        return [
            f"{len(names)} tensors, such as {names[0]}, are not read: {self.report.unread[names[0]]}; "
            f"they hold {sum(map(self.unread_bytes.__getitem__, names))} of {self.coverage.total} bytes"
            for names in causes.values()
        ]

    def hides(self, prefix: str) -> bool:
        """Return whether the layer `prefix`, or any module around it, has unread tensors of its own."""
        if not self.modules:
            return False
        parts = prefix.split(".")
        return any(".".join(parts[:count]) in self.modules for count in range(1, len(parts) + 1))

    def error(self) -> UnreadTensorsError | None:
        """Error for loading, running or copying the whole checkpoint; None without unread tensors."""
        unread = self.report.unread
        return UnreadTensorsError(dict(unread), self.coverage.unread) if unread else None

    def _module(self, name: str) -> str:
        """Innermost module in `modules` that contains the tensor `name`; the name itself without one."""
        parts = name.split(".")
        leads = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        return next((lead for lead in leads if lead in self.modules), name)


def account(index: LayerIndex) -> Account:
    """Account for every tensor, as after a load of all layers and plain tensors."""
    storage, ledger = index.weights.storage, index.weights.ledger()
    infos = {name: storage.info(name) for name in index.names}
    sizes = {name: 0 if info.shared else info.nbytes for name, info in infos.items()}
    unread: set[str] = set()
    refused: set[str] = set()
    for prefix, layer in index.layers.items():
        if isinstance(layer, UnsupportedFormatError):
            unread.update(index.under(prefix))
            ledger.leave(index.under(prefix), _reason(layer))
        elif isinstance(layer, QloadError):
            refused.update(index.under(prefix))
    ledger.refuse(refused)
    stacks = {name for name in index.names if name not in index.specs and unread_reason(name, storage)}
    plain = [
        name
        for name in index.names
        if not (name in refused or name in unread or name in stacks)
        and _is_plain(index, name, infos[name])
        and not ledger.exempts(name, storage)  # last, as it is slow and most names are of quantized layers
    ]
    ledger.take(index.specs)
    ledger.take(name for name in plain if name not in index.specs)
    report = ledger.report(storage)
    unexplained = [name for name in report.unused if name not in refused]
    layers = [layer for layer in index.layers.values() if not isinstance(layer, QloadError)]
    reasons: dict[str, int] = {}
    for name, reason in report.exempted.items():
        reasons[reason] = reasons.get(reason, 0) + infos[name].nbytes
    coverage = Coverage(
        layers=len(layers),
        plain_tensors=len(plain),
        total=_bytes(sizes, index.names),
        read=_bytes(sizes, report.used),
        exempt=reasons,
        unread=_bytes(sizes, report.unread),
        refused=_bytes(sizes, [name for name in report.unused if name in refused]),
        unexplained=_bytes(sizes, unexplained),
    )
    return Account(
        report,
        coverage,
        {name: _layer_of(index, name) for name in unexplained},
        {name: sizes[name] for name in report.unread},
        frozenset(name.rpartition(".")[0] or index.prefixes[name] for name in report.unread),
    )


def check_all_read(weights: Weights) -> None:
    """Raise UnreadTensorsError for a checkpoint with a tensor that no format reads.

    Only headers and facts are read. All code that loads, runs or copies a whole model calls it first: the
    model would be wrong without the values of an unread tensor.
    """
    error = account(LayerIndex(weights)).error()
    if error is not None:
        raise error


def _reason(error: UnsupportedFormatError) -> str:
    """Format of an unread layer, reason and remedy, in one line."""
    text = f"{error.format}: {error.reason}" if error.format not in error.reason else error.reason
    return f"{text}; {error.remedy}" if error.remedy else text


def _is_plain(index: LayerIndex, name: str, info: TensorInfo) -> bool:
    """Return whether a tensor is floats of a plain layer, a bias, or a single parameter."""
    if info.stored_dtype not in FLOATS:
        return False
    layer = _layer_of(index, name)
    return layer is None or layer.format.weight_type.plain or name.rpartition(".")[2] == "bias"


def _layer_of(index: LayerIndex, name: str) -> LayerDescription | None:
    """Readable layer with the prefix of a tensor; None without one."""
    layer = index.layers.get(index.prefixes[name])
    return layer if isinstance(layer, LayerDescription) else None


def _bytes(sizes: Mapping[str, int], names: Iterable[str]) -> int:
    return sum(map(sizes.__getitem__, names))
