"""Checkpoint files of a transformers model: found as `open_checkpoint` finds them, and read as `Weights`.

transformers finds `model.safetensors` and its index alone. It reads the name of another file or index from
the model's config; further files are appended to its list of files.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from os import PathLike, path
from pathlib import Path
from typing import Any

import torch

from qload.checkpoint import Checkpoint, LayerIndex, account, target_of_dtype
from qload.detect import KernelTarget, for_target
from qload.engines.transformers.config import QloadConfig
from qload.engines.transformers.layer_names import LayerMap
from qload.engines.transformers.saving import LoadedCheckpoint
from qload.errors import ArgumentError, StorageError
from qload.errors.exceptions import list_names
from qload.experts.stack_layouts import StackOrders
from qload.experts.stacked_storage import ExpertStacks
from qload.formats.unquantized import FLOATS
from qload.loader import WeightsLoader
from qload.parallel import ALONE, ProcessGroup
from qload.quantize import QuantizingLoader
from qload.spec import named
from qload.storage import TensorInfo, locate, snapshot
from qload.storage.checkpoint_files import INDEX, SUFFIX, USUAL, CheckpointFiles
from qload.weights import Weights

FILES_KEY = "qload_files"  # a key of the model's config between `load` and the quantizer
FILE_NAME_KEY = "transformers_weights"  # transformers' key for the name of the file, or of the index
DEFAULT_NAMES = (f"{USUAL}{SUFFIX}", f"{USUAL}{INDEX}")
VARIANT = re.compile(r"model\.[^.]+\.safetensors(\.index\.json)?")
FILE_OPTIONS = ("variant", "gguf_file", "state_dict")  # options of `from_pretrained` that name other files
NOT_FOUND_TEXTS = ("no file named", "not appear to have a file named")  # in transformers' OSError
MAX_LISTED_NAMES = 3


def folder_and_files(
    place: str | PathLike[str], options: dict[str, Any]
) -> tuple[str | PathLike[str], list[str]]:
    """Return the folder for transformers to open, and the files in it; StorageError if there are none.

    No files for a model's name on the hub, and for `options` of `from_pretrained` that name other files:
    transformers finds these.
    """
    chosen = any(options.get(key) is not None for key in FILE_OPTIONS)
    if chosen or options.get("use_safetensors") is False or not path.exists(place):
        return place, []
    root = Path(snapshot(place))
    at = root / options.get("subfolder", "") if root.is_dir() else root
    files = _paths(locate(at), at if at.is_dir() else at.parent)
    return root if root.is_dir() else root.parent, files


def nondefault_files(folder: str) -> list[str] | None:
    """Return the files of a folder without a file that transformers finds; None if it finds one."""
    if not path.isdir(folder):
        return None
    names = {file.name for file in Path(folder).iterdir() if file.name.endswith((SUFFIX, INDEX))}
    if not names or not names.isdisjoint(DEFAULT_NAMES) or any(map(VARIANT.fullmatch, names)):
        return None
    return _paths(locate(folder), Path(folder))


def _paths(located: CheckpointFiles, folder: Path) -> list[str]:
    """Paths of the index, if there is one, and of the files."""
    index = [] if located.index is None else [str(folder / located.index)]
    return [*index, *map(str, located.files.values())]


def add_files(checkpoint_files: list[str], files: Sequence[str]) -> None:
    """Replace transformers' list, with one of these files, by all of them."""
    tensors = [file for file in files if file.endswith(SUFFIX)]
    if checkpoint_files and any(path.samefile(checkpoint_files[0], file) for file in tensors):
        checkpoint_files[:] = tensors


def check_files(checkpoint_files: Sequence[str]) -> None:
    """Raise ArgumentError if `open_checkpoint` finds other files in the folder than transformers.

    A single file of a variant may have others in its folder.
    """
    theirs = {Path(file).name for file in checkpoint_files}
    if not theirs or (len(theirs) == 1 and all(map(VARIANT.fullmatch, theirs))):
        return
    folder = str(Path(checkpoint_files[0]).parent)
    ours = {Path(str(file)).name for file in locate(folder).files.values()}
    if not ours <= theirs:
        missing, found = (list_names(sorted(names), MAX_LISTED_NAMES) for names in (ours - theirs, theirs))
        expected = f"one set of files: qload finds {missing} in {folder}"
        raise ArgumentError("checkpoint", expected, f"{found} of transformers; remove either")


@contextmanager
def missing_files_as_storage_error(place: str | PathLike[str]) -> Iterator[None]:
    """Convert transformers' OSError about missing files to a StorageError with a remedy."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError) or not any(text in str(error) for text in NOT_FOUND_TEXTS):
            raise
        problem = f"transformers finds no file of weights: {str(error).splitlines()[0]:.200}"
        remedy = "download all its files into a folder, and load it: its files may have any name"
        raise StorageError(str(place), "no-files", problem, remedy=remedy) from error


class CheckpointReader:
    """Files that transformers reads, opened once, as `Weights` for any device and rank.

    Parameters
    ----------
    files
        The files. ArgumentError if they are not safetensors, or not in one folder.
    config
        Options of the load.
    dtype
        Of the activations and of plain floats.
    stack_orders
        Orders of stacked experts by the model's class; None: by names and shapes alone.
    """

    def __init__(
        self,
        files: Sequence[str],
        config: QloadConfig,
        dtype: torch.dtype,
        stack_orders: StackOrders | None = None,
    ) -> None:
        folders = {str(Path(file).parent) for file in files}
        if len(folders) != 1 or not all(file.endswith(".safetensors") for file in files):
            got = ", ".join(files) or "no file"
            raise ArgumentError("checkpoint", "safetensors files in one folder", got)
        place = files[0] if len(files) == 1 else folders.pop()
        self._place = place
        self._checkpoint = Checkpoint.open(place, stack_orders=stack_orders)
        self._nonfinite = config.nonfinite
        self.dtype: torch.dtype = dtype
        try:
            self._loader = self._loader_for(config)
            self.groups: LayerIndex = LayerIndex(
                self.weights("cpu", ALONE, as_stored=config.quantizer is None)
            )
        except BaseException:
            self.close()
            raise

    def _loader_for(self, config: QloadConfig) -> WeightsLoader:
        """Wrap the checkpoint's own loader in one that repacks or quantizes as a `config` says."""
        inner = self._checkpoint.loader
        if config.quantizer is not None:
            return QuantizingLoader(inner, config.quantizer, policy=config.policy, dtype=self.dtype)
        target = (
            config.target if isinstance(config.target, KernelTarget | None) else KernelTarget(config.target)
        )
        return for_target(inner, target_of_dtype(target, self.dtype))

    def weights(self, device: torch.device | str, group: ProcessGroup, as_stored: bool = False) -> Weights:
        """Return the tensors for one rank, on `device`; `as_stored`: without repacking."""
        return self._checkpoint.weights_for(
            loader=None if as_stored else self._loader,
            device=device,
            dtype=self.dtype,
            process_group=group,
            nonfinite=self._nonfinite,
        )

    def check_all_read(self) -> None:
        """Raise UnreadTensorsError for a tensor that no format reads."""
        error = account(self.groups).error()
        if error is not None:
            self.close()
            raise error

    def infos(self) -> Mapping[str, TensorInfo]:
        """Return the headers of all stored tensors; a stack of experts is one tensor."""
        storage = self._checkpoint.storage
        stored = storage.storage if isinstance(storage, ExpertStacks) else storage
        return {name: stored.info(name) for name in stored.keys()}  # noqa: SIM118, a storage is not a dict

    @cached_property
    def stacks(self) -> Mapping[str, Sequence[str]]:
        """Prefix of the experts of a layer -> names of their stored stacks."""
        storage, sources = self._checkpoint.storage, dict[str, list[str]]()
        for stack in storage.stacks if isinstance(storage, ExpertStacks) else ():
            sources.setdefault(stack.lead, []).append(stack.source)
        return sources

    def is_quantized(self, prefix: str) -> bool:
        """Return whether the layer is stored quantized."""
        weights, weight = self.groups.weights, named(prefix, "weight")
        if self.groups.is_quantized(prefix):
            return True
        return weights.has_tensor(weight) and weights.info(weight).stored_dtype not in FLOATS

    def will_be_quantized(self, prefix: str) -> bool:
        """Return whether the layer is plain, and quantized by the load."""
        weights = self.groups.weights
        if not isinstance(weights.loader, QuantizingLoader):
            return False
        return weights.loader.made(weights.loader.describe(weights, prefix), weights.device) is not None

    def nbytes(self, prefix: str) -> int:
        """Return the stored bytes under a prefix, of a layer or of the experts of one."""
        weights = self.groups.weights
        return sum(weights.info(name).nbytes for name in weights.names_under(f"{prefix}."))

    def read_names(self, layers: LayerMap) -> Iterator[str]:
        """Yield the stored names of the tensors of these layers, and of exempt tensors."""
        exempted = self.groups.weights.report().exempted
        yield from {*self.layer_tensor_names(layers), *exempted} & self.infos().keys()

    def layer_tensor_names(self, layers: LayerMap) -> Iterator[str]:
        """Yield the stored names of the tensors of these layers, except biases of linear layers."""
        prefixes = layers.layer_prefixes
        stacks = {source for prefix in layers.experts.values() for source in self.stacks.get(prefix, ())}
        leads = tuple(f"{prefix}." for prefix in layers.experts.values() if prefix not in self.stacks)
        for name in self.infos():
            prefix = self.groups.prefixes.get(name)
            is_own = prefix in prefixes and name != named(prefix or "", "bias")
            if is_own or name in stacks or name.startswith(leads):
                yield name

    def loaded(self, layers: LayerMap) -> LoadedCheckpoint:
        """Describe the files for a save of the model, whose quantized layers are these."""
        quantized = frozenset(self.layer_tensor_names(layers))
        return LoadedCheckpoint(str(Path(self._place).absolute()), dict(self.infos()), quantized)

    def close(self) -> None:
        """Close the files."""
        self._checkpoint.close()
