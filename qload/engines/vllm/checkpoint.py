"""The tensors that a checkpoint has, by vLLM's names of modules: by them a layer knows its last one."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from qload.architecture import architecture_of
from qload.detect import read_model_config
from qload.detect.config_reader import method_of_own_file
from qload.detect.matching import EMBEDDINGS
from qload.errors import ConfigError, StorageError
from qload.experts import with_experts
from qload.listing import check_all_read
from qload.loader import WeightsLoader
from qload.storage import SafetensorsStorage, locate
from qload.storage.checkpoint_files import INDEX, SUFFIX, USUAL
from qload.weights import Weights

PLAIN = frozenset(("weight", "bias"))


class CheckpointNames:
    """Which tensors a checkpoint has, once its files are there; before that nothing is known.

    Parameters
    ----------
    model, revision
        As vLLM has them: a folder, or a name and a commit of the hub, of which only what was downloaded
        already is looked at.
    """

    def __init__(self, model: str = "", revision: str | None = None) -> None:
        self.model, self.revision = model, revision
        self._mappers: list[Any] = []
        self._stored: Mapping[str, str] | None = None  # the stored name of each tensor, by vLLM's
        self._modules: Mapping[str, tuple[str, ...]] = {}  # what its tensors are called, by module

    def add(self, mapper: Any) -> None:
        """Rename by vLLM's `mapper` from here on, after those before."""
        self._mappers.append(mapper)
        self._stored = None

    def of(self, modules: Iterable[str]) -> set[str]:
        """vLLM's names of all tensors directly under these modules, as if vLLM merged no layers."""
        self._read()
        return {f"{module}.{rest}" for module in modules for rest in self._modules.get(module, ())}

    def under(self, prefix: str) -> set[str]:
        """vLLM's names of all tensors that begin with a prefix."""
        self._read()
        return {name for name in self._stored or () if name.startswith(prefix)}

    def stored(self, module: str) -> str:
        """What the checkpoint calls a module of vLLM's; the same, where it is not known."""
        rest = next(iter(sorted(self.of([module]))), None)
        if rest is None:
            return module
        ending, name = rest.removeprefix(module), (self._stored or {})[rest]
        return name.removesuffix(ending) if name.endswith(ending) else module

    def suffixes(self, module: str) -> Collection[str]:
        """What follows the module's name in the names of its tensors; none where nothing is known."""
        self._read()
        return self._modules.get(module, ())

    def embeddings(self, suffixes: Collection[str]) -> list[str]:
        """The modules that are named as embeddings are, and have a tensor of one of these names."""
        self._read()
        named = (module for module in self._modules if module.rpartition(".")[2] in EMBEDDINGS)
        return sorted(module for module in named if not {*suffixes}.isdisjoint(self._modules[module]))

    def is_plain(self, module: str) -> bool:
        """Whether a layer's only tensors are its weight and its bias, in a type of plain numbers."""
        return bool(self.suffixes(module)) and {*self.suffixes(module)} <= PLAIN

    def check_all_read(self, loader: WeightsLoader) -> None:
        """Raise UnreadTensorsError for a stored tensor that neither `loader` nor stacks of experts read.

        StorageError where vLLM would read other files than `open_checkpoint` finds.
        """
        folder = self._folder()
        if folder is not None:
            check_files(folder)
            config = read_model_config(folder)
            with SafetensorsStorage(folder) as storage:
                known = architecture_of(config)
                check_all_read(Weights(with_experts(storage, config), loader=loader, architecture=known))

    def _read(self) -> None:
        folder = self._folder() if self._stored is None else None
        if folder is None:
            return
        with SafetensorsStorage(folder) as storage:
            there = storage.keys()
        names = {name: name for name in there}
        for mapper in self._mappers:
            renamed = ((mapper.map_name(name), stored) for name, stored in names.items())
            names = {name: stored for name, stored in renamed if name is not None}
        modules: dict[str, list[str]] = {}
        for name in names:
            segments = name.split(".")
            for at in range(max(1, len(segments) - 3), len(segments)):  # `weight.quant_state.x` has dots
                modules.setdefault(".".join(segments[:at]), []).append(".".join(segments[at:]))
        self._stored, self._modules = names, {module: tuple(rest) for module, rest in modules.items()}

    def _folder(self) -> Path | None:
        """Where the files lie, if they do yet."""
        if not self.model:
            return None
        path = Path(self.model)
        if not path.is_dir():
            from huggingface_hub import try_to_load_from_cache

            found = try_to_load_from_cache(self.model, "config.json", revision=self.revision)
            if not isinstance(found, str):
                return None
            path = Path(found).parent
        return path if any(path.glob("*.safetensors")) else None


def check_files(folder: Path) -> None:
    """Raise StorageError where vLLM reads other files of a folder than `open_checkpoint` finds.

    vLLM takes all safetensors files, without those that `model.safetensors.index.json` does not name.
    """
    theirs = {file.name for file in folder.glob(f"*{SUFFIX}")}
    index = folder / f"{USUAL}{INDEX}"
    if index.is_file():
        theirs &= {*(locate(index).weight_map or {}).values()}
    ours = {*locate(folder).files}
    if theirs != ours:
        only = [f"vLLM alone reads {', '.join(sorted(theirs - ours))}"] if theirs - ours else []
        only += [f"qload alone reads {', '.join(sorted(ours - theirs))}"] if ours - theirs else []
        remedy = f"move the files of another checkpoint away, or write {USUAL}{INDEX} with all names"
        raise StorageError(str(folder), "index-mismatch", "; ".join(only), remedy=remedy)


class Awaited:
    """The tensors of one layer that have not arrived yet, where it is known which those are."""

    def __init__(self, names: set[str]) -> None:
        self._known, self._left = bool(names), set(names)

    def are_all_there(self, name: str) -> bool:
        """Note that a tensor has arrived; whether it was the last of them."""
        self._left.discard(name)
        return self._known and not self._left


SETTINGS = ("target", "activations", "nonfinite")


def section_and_settings(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The section as `qload.loader_from_config` takes it, and those of `SETTINGS` that are said.

    `hf_quant_config.json` is ModelOpt's and has the section inside; `quantize_config.json` and
    `quant_config.json` need not name their method, which their keys tell. ConfigError for a `qload` that is
    not an object with these settings.
    """
    values = dict(config)
    settings = values.pop("qload", {})
    if not isinstance(settings, Mapping) or not set(settings) <= {*SETTINGS}:
        wanted = f"an object with {' and '.join(SETTINGS)}"
        raise ConfigError("config", "quantization_config.qload", wanted, repr(settings))
    inside = values.get("quantization")
    if isinstance(inside, Mapping):
        values = {"quant_method": "modelopt", **inside}
    unsaid = all(values.get(key) is None for key in ("quant_method", "method", "config_groups"))
    method = method_of_own_file(values) if unsaid else None
    return values if method is None else {**values, "quant_method": method}, dict(settings)
