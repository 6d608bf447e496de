"""`save_pretrained` of models with quantized layers, in the format of their checkpoint.

Quantized tensors are copied from the files that the model was loaded from, byte for byte; plain tensors are
those of the model, under the checkpoint's names:

    model.layers.0.mlp.up_proj.qweight      copied
    model.norm.weight                       from the model
    mtp.0.norm.weight                       copied: the model has no place for it
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import PreTrainedModel, remove_tied_weights_from_state_dict

from qload.checkpoint import Checkpoint
from qload.detect.config_reader import MODELOPT, SIDE_FILES
from qload.dtypes import STORED
from qload.engines.transformers.placeholder_layers import PlaceholderLayer
from qload.errors import ArgumentError
from qload.errors.exceptions import written_to
from qload.experts import ExpertStacks
from qload.storage import TensorInfo, WeightStorage
from qload.storage.checkpoint_files import INDEX, USUAL
from qload.storage.safetensors_writer import encode_header, file_order

SECTION = "quantization_config"


@dataclass(frozen=True)
class LoadedCheckpoint:
    """Source files of a loaded model.

    Attributes
    ----------
    place
        The folder, or the file in one.
    infos
        Headers of all stored tensors at the time of the load.
    quantized
        Names of the tensors that qload loaded.
    """

    place: str
    infos: Mapping[str, TensorInfo]
    quantized: frozenset[str]

    def check(self, storage: WeightStorage) -> None:
        """Raise ArgumentError if the files have other tensors than at the time of the load."""
        for name, info in self.infos.items():
            now = storage.info(name) if name in storage.keys() else None  # noqa: SIM118
            if now is None or (now.stored_dtype, now.shape) != (info.stored_dtype, info.shape):
                expected = f"{name} as the model was loaded, {_text(info)}"
                raise ArgumentError("checkpoint", expected, "none" if now is None else _text(now))


def _text(info: TensorInfo) -> str:
    return f"{str(info.stored_dtype).removeprefix('torch.')} {list(info.shape)}"


def save_model(model: Any, loaded: LoadedCheckpoint, save_directory: Any, **options: Any) -> None:
    """Write the model to `save_directory`, an empty or a new folder, in the format of its checkpoint.

    With adapters of peft, transformers writes these alone. ArgumentError for a folder with files, for options
    that name other files, and if the checkpoint is not as it was loaded.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        PreTrainedModel.save_pretrained(model, save_directory, **options)
        return
    state = options.pop("state_dict", None)
    if not options.pop("is_main_process", True):
        return
    for name, value in options.items():
        if value not in (None, False) and name not in ("safe_serialization", "max_shard_size"):
            expected = "no value: files are divided as those of the checkpoint"
            raise ArgumentError(name, expected, repr(value))
    plain = plain_tensors(model, model.state_dict() if state is None else state)
    with Checkpoint.open(loaded.place) as checkpoint:
        storage = checkpoint.storage
        storage = storage.storage if isinstance(storage, ExpertStacks) else storage
        loaded.check(storage)
        _write_folder(
            Path(save_directory).resolve(), lambda folder: _write(folder, model, loaded, storage, plain)
        )


def plain_tensors(model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a model outside of quantized layers, by their names in the checkpoint."""
    modules = model.named_modules()
    leads = tuple(f"{name}." for name, module in modules if isinstance(module, PlaceholderLayer))
    kept = {
        name: tensor for name, tensor in state.items() if not name.startswith(leads) or name.endswith(".bias")
    }
    kept = remove_tied_weights_from_state_dict(kept, model)
    return dict(revert_weight_conversion(model, kept))


def _write_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Write a folder next to `target`, and rename it; ArgumentError if `target` has files."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ArgumentError("save_directory", "an empty folder, or none", str(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        folder.chmod(0o755)
        with written_to(folder):
            write(folder)
        if target.exists():
            target.rmdir()
        folder.rename(target)
    except BaseException:
        rmtree(folder, ignore_errors=True)
        raise


def _write(
    folder: Path, model: Any, loaded: LoadedCheckpoint, storage: WeightStorage, plain: Mapping[str, Tensor]
) -> None:
    """Write the files of the checkpoint with new contents; tensors of the model alone are in the last."""
    files: dict[str, list[str]] = {}
    for name in storage.keys():  # noqa: SIM118
        files.setdefault(Path(str(storage.info(name).file)).name, []).append(name)
    stored = {name for names in files.values() for name in names}
    files[next(reversed(files))] += [name for name in plain if name not in stored]
    if len(files) == 1:
        files = {f"{USUAL}.safetensors": next(iter(files.values()))}
    index: dict[str, str] = {}
    total = 0
    for file, names in files.items():
        own = {name: plain[name] for name in names if name in plain and name not in loaded.quantized}
        total += _write_file(folder / file, names, own, storage)
        index |= dict.fromkeys(names, file)
    texts = _texts(model, Path(loaded.place))
    if len(files) > 1:
        texts[f"{USUAL}{INDEX}"] = _json({"metadata": {"total_size": total}, "weight_map": index})
    for name, content in texts.items():
        (folder / name).write_bytes(content)


def _write_file(path: Path, names: Sequence[str], plain: Mapping[str, Tensor], storage: WeightStorage) -> int:
    """Write one file, with the tensors `plain` in place of stored ones; return the bytes of all tensors."""
    infos = {
        name: TensorInfo(STORED[plain[name].dtype], tuple(plain[name].shape))
        if name in plain
        else storage.info(name)
        for name in names
    }
    order = file_order(infos)
    with path.open("wb") as file:
        file.write(encode_header(order))
        for name in order:
            tensor = plain[name].detach().cpu() if name in plain else storage.read(name)
            file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return sum(info.nbytes for info in infos.values())


def _json(value: object) -> bytes:
    """Encode as JSON with the indentation of transformers."""
    return (json.dumps(value, indent=2) + "\n").encode()


def _texts(model: Any, place: Path) -> dict[str, bytes]:
    """Contents of configs, by their names."""
    folder = place if place.is_dir() else place.parent
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    texts = {"config.json": _json(_with_stored_section(model.config, folder / "config.json"))}
    if model.can_generate():
        texts["generation_config.json"] = model.generation_config.to_json_string().encode()
    for name in (MODELOPT, *SIDE_FILES):
        if (folder / name).is_file():
            texts[name] = (folder / name).read_bytes()
    return texts


def _with_stored_section(config: Any, source: Path) -> dict[str, Any]:
    """Return a config with the `quantization_config` of the file `source`, or without one if it has none."""
    stored, result = json.loads(source.read_bytes()), json.loads(config.to_json_string())
    for own, theirs in ((result, stored), (result.get("text_config"), stored.get("text_config"))):
        if isinstance(own, dict) and isinstance(theirs, dict):
            own.pop(SECTION, None)
            own |= {SECTION: theirs[SECTION]} if SECTION in theirs else {}
    return dict(result)
