"""The checkpoint that a model is filled from: opened once, seen from each device by each rank."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from qload.detect import KernelTarget, Target, for_target
from qload.engines.transformers.config import QloadConfig
from qload.engines.transformers.placing import Places
from qload.errors import ArgumentError
from qload.experts.stacks import ExpertStacks
from qload.formats.unquantized import FLOATS
from qload.listing import Groups, account
from qload.loader import FormatLoader, WeightsLoader
from qload.parallel import ALONE, ProcessGroup
from qload.quantize import QuantizingLoader
from qload.spec import named
from qload.storage import TensorInfo
from qload.weights import Weights, open_checkpoint


class Source:
    """The files that transformers reads, as `Weights` for any device.

    Parameters
    ----------
    files
        Those files. ArgumentError where they are no safetensors, or not in one folder.
    config
        How layers are loaded.
    dtype
        Of the activations and of plain floats.
    """

    def __init__(self, files: Sequence[str], config: QloadConfig, dtype: torch.dtype) -> None:
        folders = {str(Path(file).parent) for file in files}
        if len(folders) != 1 or not all(file.endswith(".safetensors") for file in files):
            raise ArgumentError(
                "checkpoint", "safetensors files in one folder", ", ".join(files) or "no file"
            )
        place = files[0] if len(files) == 1 else folders.pop()
        self._opened: Weights = open_checkpoint(place, dtype=dtype, nonfinite=config.nonfinite)
        self.dtype: torch.dtype = dtype
        try:
            self._loader = self._loader_of(config)
            self.groups: Groups = Groups(self.weights("cpu", ALONE, as_stored=config.quantizer is None))
        except BaseException:
            self.close()
            raise

    def _loader_of(self, config: QloadConfig) -> WeightsLoader:
        """The checkpoint's own loader, and what it repacks or quantizes for as a `config` asks."""
        inner = self._opened.loader
        if config.quantizer is None:
            return for_target(inner, self._for_activations(config.target))
        assert isinstance(inner, FormatLoader)
        return QuantizingLoader(inner, config.quantizer, policy=config.policy, dtype=self.dtype)

    def _for_activations(self, target: Target | None) -> Target | None:
        """The target, with the activations' dtype where Marlin's kernel needs one and none is said."""
        said = target if isinstance(target, KernelTarget | None) else KernelTarget(target)
        halves = self.dtype in (torch.float16, torch.bfloat16)
        unsaid = said is not None and said.kernel == "marlin" and said.dtype is None
        return replace(said, dtype=self.dtype) if said is not None and unsaid and halves else said

    def weights(self, device: torch.device | str, group: ProcessGroup, as_stored: bool = False) -> Weights:
        """The tensors for one rank, put on `device`; `as_stored`: no layer is repacked."""
        return Weights(
            self._opened.storage,
            loader=self._opened.loader if as_stored else self._loader,
            device=device,
            dtype=self.dtype,
            process_group=group,
            architecture=self._opened.architecture,
            nonfinite=self._opened.nonfinite,
        )

    def check_all_read(self) -> None:
        """Raise UnreadTensorsError for a tensor in a form that no format reads."""
        error = account(self.groups).error()
        if error is not None:
            self.close()
            raise error

    def infos(self) -> Mapping[str, TensorInfo]:
        """Headers of all stored tensors; a stack of experts is one tensor."""
        storage = self._opened.storage
        stored = storage.storage if isinstance(storage, ExpertStacks) else storage
        return {name: stored.info(name) for name in stored.keys()}  # noqa: SIM118, it is no dict

    def is_quantized(self, prefix: str) -> bool:
        """Whether the layer is stored quantized."""
        weights, weight = self.groups.weights, named(prefix, "weight")
        if self.groups.is_quantized(prefix):
            return True
        return weights.has_tensor(weight) and weights.info(weight).dtype not in FLOATS

    def will_be_quantized(self, prefix: str) -> bool:
        """Whether the layer is plain, and quantized while it is loaded."""
        weights = self.groups.weights
        if not isinstance(weights.loader, QuantizingLoader):
            return False
        return weights.loader.made(weights.loader.describe(weights, prefix), weights.device) is not None

    def nbytes(self, prefix: str) -> int:
        """What is stored under a prefix, of a layer or of the experts of one."""
        weights = self.groups.weights
        return sum(weights.info(name).nbytes for name in weights.names_under(f"{prefix}."))

    def names(self, places: Places) -> Iterator[str]:
        """What qload reads for these layers, as the files have it, and the tensors that mean no weight."""
        yield from {*self.names_of_layers(places), *self._opened.report().exempted} & self.infos().keys()

    def names_of_layers(self, places: Places) -> Iterator[str]:
        """Yield the stored names of the tensors that qload reads for these layers."""
        layers, leads = {*places.linears.values()}, tuple(f"{lead}." for lead in places.experts.values())
        for name in self.infos():
            prefix = self.groups.prefixes.get(name)
            own = prefix in layers and name != named(prefix or "", "bias")
            if own or name.startswith(leads):
                yield name

    def close(self) -> None:
        """Close the files."""
        self._opened.storage.close()
