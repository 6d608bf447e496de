"""Descriptions of torchao's tensors in the headers of files: JSON under the name of each tensor.

    "tensor_names": ["model.layers.0.mlp.up_proj.weight", ...]
    "model.layers.0.mlp.up_proj.weight": {"_type": "Float8Tensor", "_data": {"block_size": [1, 4096], ...},
                                          "_tensor_data_names": ["qdata", "scale"]}

The names of a sharded checkpoint are spread over the headers of its files. Source: torchao 0.18.0.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from qload import configs
from qload.configs.section import Model
from qload.errors import ConfigError, StorageError, UnsupportedFormatError
from qload.formats.torchao import QDATA
from qload.storage import WeightStorage, metadata_of, parse_json

TENSOR_NAMES, PARAMETER = "tensor_names", ".weight"
PLAIN_CLASS = "Tensor"
CLASSES = (
    "Float8Tensor",
    "Int8Tensor",
    "IntxUnpackedToInt8Tensor",
    "Int4Tensor",
    "NVFP4Tensor",
    "MXTensor",
)
VARIANTS = (f"torchao ({', '.join(CLASSES)})",)
REMEDY = "transformers loads it where torchao is installed, and its dequantize() gives plain weights"


class DescribedTensor(configs.Entry):
    """Class of a tensor, its attributes, and the names of its stored parts."""

    kind: str = Field(validation_alias="_type")
    attributes: dict[str, Any] = Field(default_factory=dict, validation_alias="_data")
    tensors: list[str] = Field(default_factory=list, validation_alias="_tensor_data_names")


@dataclass(frozen=True)
class DescribedLayer:
    """A layer in the header of a file: its name, class, and attributes.

    `shape`: stored shape of its codes; () if they are not stored.
    """

    file: str
    name: str
    tensor: DescribedTensor
    shape: tuple[int, ...]

    def read(self, model: type[Model]) -> Model:
        """Validate the attributes; ConfigError with file, layer and key."""
        return configs.validate(model, self.source)

    @property
    def source(self) -> configs.FoundConfig:
        """Attributes, with their place for messages."""
        return configs.FoundConfig(self.file, f"header: {self.name:.200}", self.tensor.attributes)

    def unsupported(self, variant: str) -> UnsupportedFormatError:
        """Return the error of an unsupported layer."""
        reason = f"the header of {self.file} states this class for {self.name:.200}"
        return UnsupportedFormatError(f"torchao ({variant:.80})", reason, VARIANTS, REMEDY)

    def covers(self, block: Sequence[int]) -> tuple[bool, bool]:
        """Return whether a block covers all outputs, and all inputs, of codes with a byte each."""
        N, K = self.shape if len(self.shape) == 2 else (0, 0)
        return block[0] >= N, block[1] >= K


def has_header(storage: WeightStorage) -> bool:
    """Return whether the header of a file describes tensors of torchao."""
    return any(TENSOR_NAMES in metadata for metadata in metadata_of(storage).values())


def described_layers(storage: WeightStorage) -> Iterator[DescribedLayer]:
    """Yield the tensors in the headers of all files; ConfigError for a malformed header."""
    stored = storage.keys()
    known: dict[str, DescribedTensor] = {}  # equal texts are parsed once
    for file, metadata in metadata_of(storage).items():
        if TENSOR_NAMES not in metadata:
            continue
        names = _parse(file, TENSOR_NAMES, metadata[TENSOR_NAMES])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigError(file, f"header: {TENSOR_NAMES}", "a list of names", configs.value_text(names))
        for name in dict.fromkeys(names):
            text = metadata.get(name)
            if text is None:  # described in another file
                continue
            if text not in known:
                known[text] = _parse_tensor(file, name, text)
            codes = f"{name.removesuffix(PARAMETER)}.{QDATA}"
            shape = storage.info(codes).shape if codes in stored else ()
            yield DescribedLayer(file, name, known[text], shape)


def _parse_tensor(file: str, name: str, text: str) -> DescribedTensor:
    """Parse the description of a tensor; ConfigError for another value."""
    value = _parse(file, name, text)
    if not isinstance(value, Mapping):
        raise ConfigError(file, f"header: {name:.200}", "an object", configs.value_text(value))
    return configs.validate(DescribedTensor, configs.FoundConfig(file, f"header: {name:.200}", value))


def _parse(file: str, name: str, text: str) -> Any:
    """Parse a JSON value of a header; ConfigError for other text."""
    try:
        return parse_json(text.encode(), file)
    except (ValueError, RecursionError, StorageError) as error:
        got = f"{type(error).__name__}: {error!s:.160}"
        raise ConfigError(file, f"header: {name:.200}", "JSON", got) from error
