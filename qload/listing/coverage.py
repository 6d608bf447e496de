"""Which share of a checkpoint's bytes is explained, and by what."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from qload.errors import QloadError
from qload.formats.unquantized import FLOATS
from qload.listing.groups import Groups
from qload.loader import LayerDescription
from qload.storage import TensorInfo
from qload.weights import LoadReport


@dataclass(frozen=True)
class Coverage:
    """The bytes of a checkpoint by what explains them; the five parts add up to `total`.

    Attributes
    ----------
    layers
        How many layers can be read, plain ones among them.
    plain_tensors
        How many plain tensors there are: those of plain layers, biases, and parameters of their own.
    total
        The bytes of all tensors.
    read
        Of tensors that belong to a layer, and of plain tensors.
    exempt
        By the reason, of tensors that no layer has and no weight depends on.
    unread
        Of tensors that no format reads yet.
    refused
        Of layers that cannot be read, each of which is a finding.
    unexplained
        Of tensors that nothing explains, each of which is a finding.
    """

    layers: int = 0
    plain_tensors: int = 0
    total: int = 0
    read: int = 0
    exempt: Mapping[str, int] = field(default_factory=dict)
    unread: int = 0
    refused: int = 0
    unexplained: int = 0

    @property
    def explained(self) -> int:
        """The bytes that are read, or exempt."""
        return self.read + sum(self.exempt.values())


@dataclass(frozen=True)
class Account:
    """What became of each tensor, in the words of the ledger of loads; `coverage` has it in bytes."""

    report: LoadReport
    coverage: Coverage
    unexplained: Mapping[str, LayerDescription | None]  # by name, with the layer that it stands in


def account(groups: Groups) -> Account:
    """Every tensor, as if each layer had been loaded and each plain tensor been read."""
    storage, ledger = groups.weights.storage, groups.weights.ledger()
    refused = {
        name
        for prefix, layer in groups.layers.items()
        if isinstance(layer, QloadError)
        for name in groups.under(prefix)
    }
    infos = {name: storage.info(name) for name in groups.names}
    plain = [
        name
        for name in groups.names
        if name not in refused
        and _is_plain(groups, name, infos[name])
        and ledger.excuse(name, storage) is None  # asked last: most names are of quantized layers
    ]
    ledger.take(groups.specs)
    ledger.take(name for name in plain if name not in groups.specs)
    report = ledger.report(storage)
    left = [name for name in report.unused if name not in refused]
    layers = [layer for layer in groups.layers.values() if not isinstance(layer, QloadError)]
    reasons: dict[str, int] = {}
    for name, reason in report.exempted.items():
        reasons[reason] = reasons.get(reason, 0) + infos[name].nbytes
    coverage = Coverage(
        layers=len(layers),
        plain_tensors=len(plain),
        total=_bytes(infos, groups.names),
        read=_bytes(infos, report.used),
        exempt=reasons,
        unread=_bytes(infos, report.unread),
        refused=_bytes(infos, [name for name in report.unused if name in refused]),
        unexplained=_bytes(infos, left),
    )
    return Account(report, coverage, {name: _within(groups, name) for name in left})


def _is_plain(groups: Groups, name: str, info: TensorInfo) -> bool:
    """Floats that no format has to explain: of a plain layer, a bias, or a parameter of its own."""
    if info.dtype not in FLOATS:
        return False
    layer = _within(groups, name)
    return layer is None or layer.format.weight_type.plain or name.rpartition(".")[2] == "bias"


def _within(groups: Groups, name: str) -> LayerDescription | None:
    """The layer under whose prefix a tensor is stored, if it can be read."""
    layer = groups.layers.get(groups.prefixes[name])
    return layer if isinstance(layer, LayerDescription) else None


def _bytes(infos: Mapping[str, TensorInfo], names: Iterable[str]) -> int:
    return sum(infos[name].nbytes for name in names if not infos[name].shared)
