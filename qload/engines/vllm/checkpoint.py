"""A checkpoint in vLLM's terms: its tensors by names of vLLM's modules, and its quantization config."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from qload.checkpoint import Checkpoint, check_all_read
from qload.configs.matching import EMBEDDINGS
from qload.detect.config_reader import method_of_own_file
from qload.errors import ConfigError, StorageError
from qload.loader import FormatLoader
from qload.storage import SafetensorsStorage, locate
from qload.storage.checkpoint_files import INDEX, SUFFIX, USUAL

PLAIN_SUFFIXES = frozenset(("weight", "bias"))
MAX_SUFFIX_SEGMENTS = 3  # `weight.quant_state.x` has dots
SETTINGS = ("target", "activations", "nonfinite")


def section_and_settings(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split vLLM's quantization config into a section for `qload.loader_from_config` and qload's `SETTINGS`.

    `config`: a section of `config.json`, or a tool's own file. `hf_quant_config.json`, ModelOpt's, has the
    section inside; `quantize_config.json` and `quant_config.json` need not name their method, which their
    keys show. ConfigError for a `qload` that is not an object with these settings.
    """
    values = dict(config)
    settings = values.pop("qload", {})
    if not isinstance(settings, Mapping) or not set(settings) <= {*SETTINGS}:
        expected = f"an object with {' and '.join(SETTINGS)}"
        raise ConfigError("config", "quantization_config.qload", expected, repr(settings))
    inner = values.get("quantization")
    if isinstance(inner, Mapping):
        values = {"quant_method": "modelopt", **inner}
    has_method = any(values.get(key) is not None for key in ("quant_method", "method", "config_groups"))
    method = None if has_method else method_of_own_file(values)
    return values if method is None else {**values, "quant_method": method}, dict(settings)


class CheckpointNames:
    """Tensor names of a checkpoint by vLLM's modules; empty until its files are on disk.

    Parameters
    ----------
    model, revision
        As in vLLM: a folder, or a name and a commit of the hub, looked up in the local cache alone.
    """

    def __init__(self, model: str = "", revision: str | None = None) -> None:
        self.model, self.revision = model, revision
        self._mappers: list[Any] = []
        self._stored: Mapping[str, str] | None = None  # vLLM's name of a tensor -> its stored name
        self._modules: Mapping[str, tuple[str, ...]] = {}  # vLLM's module -> the suffixes of its tensors

    def add_mapper(self, mapper: Any) -> None:
        """Rename tensors by vLLM's `mapper`, after the earlier ones."""
        self._mappers.append(mapper)
        self._stored = None

    def tensors_of(self, modules: Iterable[str]) -> set[str]:
        """Return vLLM's names of all tensors directly under these modules, before vLLM merges layers."""
        self._read()
        return {f"{module}.{suffix}" for module in modules for suffix in self._modules.get(module, ())}

    def under(self, prefix: str) -> set[str]:
        """Return vLLM's names of all tensors that begin with a prefix."""
        self._read()
        return {name for name in self._stored or () if name.startswith(prefix)}

    def stored_module(self, module: str) -> str:
        """Return the stored name of a module of vLLM; its own name if unknown."""
        tensor = next(iter(sorted(self.tensors_of([module]))), None)
        if tensor is None:
            return module
        suffix, stored = tensor.removeprefix(module), (self._stored or {})[tensor]
        return stored.removesuffix(suffix) if stored.endswith(suffix) else module

    def suffixes(self, module: str) -> Collection[str]:
        """Return the suffixes of a module's tensors; empty if unknown."""
        self._read()
        return self._modules.get(module, ())

    def embeddings(self, suffixes: Collection[str]) -> list[str]:
        """Return the modules that are named as embeddings and have a tensor with one of these suffixes."""
        self._read()
        named = (module for module in self._modules if module.rpartition(".")[2] in EMBEDDINGS)
        return sorted(module for module in named if not {*suffixes}.isdisjoint(self._modules[module]))

    def is_plain(self, module: str) -> bool:
        """Return whether a layer has tensors, and none but a weight and a bias."""
        return bool(self.suffixes(module)) and {*self.suffixes(module)} <= PLAIN_SUFFIXES

    def check_all_read(self, loader: FormatLoader) -> None:
        """Raise UnreadTensorsError before a load if neither `loader` nor stacks of experts read a tensor.

        StorageError if vLLM would read other files than `open_checkpoint` finds.
        """
        folder = self._folder()
        if folder is not None:
            check_files(folder)
            with Checkpoint.open(folder, loader=loader) as checkpoint:  # of vLLM's config, which may differ
                check_all_read(checkpoint.weights)

    def _read(self) -> None:
        folder = self._folder() if self._stored is None else None
        if folder is None:
            return
        with SafetensorsStorage(folder) as storage:
            names = {name: name for name in storage.keys()}  # noqa: SIM118, a storage is not a dict
        for mapper in self._mappers:
            renamed = ((mapper.map_name(name), stored) for name, stored in names.items())
            names = {name: stored for name, stored in renamed if name is not None}
        modules: dict[str, list[str]] = {}
        for name in names:
            segments = name.split(".")
            for at in range(max(1, len(segments) - MAX_SUFFIX_SEGMENTS), len(segments)):
                modules.setdefault(".".join(segments[:at]), []).append(".".join(segments[at:]))
        self._stored = names
        self._modules = {module: tuple(suffixes) for module, suffixes in modules.items()}

    def _folder(self) -> Path | None:
        """Folder of the files; None before they are on disk."""
        if not self.model:
            return None
        path = Path(self.model)
        if not path.is_dir():
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(self.model, "config.json", revision=self.revision)
            if not isinstance(cached, str):
                return None
            path = Path(cached).parent
        return path if any(path.glob("*.safetensors")) else None


def check_files(folder: Path) -> None:
    """Raise StorageError if vLLM reads other files of a folder than `open_checkpoint` finds.

    vLLM reads all safetensors files, except those that `model.safetensors.index.json` does not name.
    """
    theirs = {file.name for file in folder.glob(f"*{SUFFIX}")}
    index = folder / f"{USUAL}{INDEX}"
    if index.is_file():
        theirs &= {*(locate(index).weight_map or {}).values()}
    ours = {*locate(folder).files}
    if theirs != ours:
        reasons = [
            f"{reader} alone reads {', '.join(sorted(only))}"
            for reader, only in (("vLLM", theirs - ours), ("qload", ours - theirs))
            if only
        ]
        remedy = f"move the files of another checkpoint away, or write {USUAL}{INDEX} with all names"
        raise StorageError(str(folder), "index-mismatch", "; ".join(reasons), remedy=remedy)


class PendingTensors:
    """Names of the tensors of a layer that are not loaded yet; without names, loading never completes."""

    def __init__(self, names: set[str]) -> None:
        self._known, self._pending = bool(names), set(names)

    def mark_loaded(self, name: str) -> bool:
        """Remove a name; return whether it was the last."""
        self._pending.discard(name)
        return self._known and not self._pending
