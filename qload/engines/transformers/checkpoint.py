"""Checkpoint files for transformers: those that `open_checkpoint` finds, whatever their names are.

transformers looks for `model.safetensors` and its index alone. It takes another name from its config, of one
file or an index; further files are added to its list of files before it reads any.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike, path
from pathlib import Path
from typing import Any

import torch

from qload.detect import KernelTarget, Target, for_target
from qload.engines.transformers.config import QloadConfig
from qload.engines.transformers.layer_names import Places
from qload.errors import ArgumentError, StorageError
from qload.experts.stacks import ExpertStacks
from qload.formats.unquantized import FLOATS
from qload.listing import Groups, account
from qload.loader import FormatLoader, WeightsLoader
from qload.parallel import ALONE, ProcessGroup
from qload.quantize import QuantizingLoader
from qload.spec import named
from qload.storage import TensorInfo, locate, snapshot
from qload.storage.checkpoint_files import INDEX, SUFFIX, USUAL, CheckpointFiles
from qload.weights import Weights, open_checkpoint

FOUND = "qload_files"  # a key of the model's config between `load` and the quantizer
NAME = "transformers_weights"  # transformers' key for the name of the file, or of the index
USUAL_NAMES = (f"{USUAL}{SUFFIX}", f"{USUAL}{INDEX}")
VARIANT = re.compile(r"model\.[^.]+\.safetensors(\.index\.json)?")
CHOICES = ("variant", "gguf_file", "state_dict")  # options that name other files
NOT_FOUND = ("no file named", "not appear to have a file named")  # in transformers' OSError


def folder_and_files(
    place: str | PathLike[str], options: dict[str, Any]
) -> tuple[str | PathLike[str], list[str]]:
    """The folder that transformers is to open, and the files in it; StorageError where there are none.

    No files of a model's name on the hub, and where `options` of `from_pretrained` name others: transformers
    finds them.
    """
    chosen = any(options.get(key) is not None for key in CHOICES) or options.get("use_safetensors") is False
    if chosen or not path.exists(place):
        return place, []
    root = Path(snapshot(place))
    where = root / options.get("subfolder", "") if root.is_dir() else root
    files = _names(locate(where), where if where.is_dir() else where.parent)
    return root if root.is_dir() else root.parent, files


def unusual_files(folder: str) -> list[str] | None:
    """The files of a folder in which transformers would find none; None where it finds some by itself."""
    if not path.isdir(folder):
        return None
    names = {each.name for each in Path(folder).iterdir() if each.name.endswith((SUFFIX, INDEX))}
    if not names or not names.isdisjoint(USUAL_NAMES) or any(map(VARIANT.fullmatch, names)):
        return None
    return _names(locate(folder), Path(folder))


def _names(located: CheckpointFiles, folder: Path) -> list[str]:
    """The paths of the files; before them that of the index, where there is one."""
    index = [] if located.index is None else [str(folder / located.index)]
    return [*index, *map(str, located.files.values())]


def complete(checkpoint_files: list[str], found: Sequence[str]) -> None:
    """Add to transformers' list of files those that were `found` with the one that it was told of."""
    files = [file for file in found if file.endswith(SUFFIX)]
    if checkpoint_files and any(path.samefile(checkpoint_files[0], file) for file in files):
        checkpoint_files[:] = files


def check_files(checkpoint_files: Sequence[str]) -> None:
    """ArgumentError where `open_checkpoint` finds other files in the folder than transformers has found.

    One file of a variant, which a user has named, may have others beside it.
    """
    theirs = {Path(file).name for file in checkpoint_files}
    folder = str(Path(checkpoint_files[0]).parent) if checkpoint_files else ""
    if not theirs or (len(theirs) == 1 and all(map(VARIANT.fullmatch, theirs))):
        return
    ours = {Path(str(file)).name for file in locate(folder).files.values()}
    if not ours <= theirs:
        expected = f"one set of files: qload finds {_some(ours - theirs)} in {folder}"
        raise ArgumentError("checkpoint", expected, f"{_some(theirs)} of transformers; remove either")


def _some(names: set[str]) -> str:
    first = sorted(names)
    return ", ".join(first[:3]) + (f" and {len(first) - 3} more" if first[3:] else "")


@contextmanager
def named_files(place: str | PathLike[str]) -> Iterator[None]:
    """Inside, an OSError of transformers about names of files is a StorageError with a remedy."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError) or not any(text in str(error) for text in NOT_FOUND):
            raise
        what = f"transformers finds no file of weights: {str(error).splitlines()[0]:.200}"
        remedy = "download all its files into a folder, and load that: files of other names are found there"
        raise StorageError(str(place), "no-files", what, remedy=remedy) from error


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
