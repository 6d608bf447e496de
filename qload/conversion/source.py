"""The checkpoint that a new one is made of: its files, its tensors as they are stored, formats of layers."""

from collections.abc import Mapping
from pathlib import Path

from qload.errors import QloadError
from qload.experts import ExpertStacks
from qload.loader import LayerDescription
from qload.storage import SafetensorsStorage, WeightStorage, is_directory, snapshot
from qload.verify.report import Reason, reason_of
from qload.verify.subject import Subject


def why_unreadable(subject: Subject) -> str:
    """What is wrong with all of it; "" where it can be asked."""
    reason = unreadable(subject)
    return "" if reason is None else reason["unreadable"] or reason["unsupported"]


def unreadable(subject: Subject) -> Reason | None:
    """Why nothing of it can be read, as fields of a report; None if it can."""
    return reason_of(subject.errors) if subject.errors or subject.weights is None else None


def as_stored(subject: Subject) -> WeightStorage:
    """Its tensors, those of all experts of a layer in one as they are."""
    assert subject.weights is not None
    storage = subject.weights.storage
    return storage.storage if isinstance(storage, ExpertStacks) else storage


def source_files(subject: Subject) -> Mapping[str, Path]:
    """Its files, by name."""
    storage = as_stored(subject)
    assert isinstance(storage, SafetensorsStorage)
    return {name: place for name, place in storage.files.items() if isinstance(place, Path)}


def source_folder(subject: Subject) -> Path:
    """Where its configs and tokenizers stand."""
    place = Path(snapshot(subject.place))
    return place if is_directory(place) else place.parent


def format_of(layer: LayerDescription | QloadError | None) -> str | None:
    """The format that a layer is stored in; None of what is no layer, or cannot be read."""
    return layer.format.weight_type.format if isinstance(layer, LayerDescription) else None
