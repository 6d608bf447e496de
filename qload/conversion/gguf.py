"""GGUF as a target: names, order of rows and keys of llama.cpp, for types of model that `detect.gguf` reads.

    queries and keys of llama       rows of a head in the order 0, d / 2, 1, ...
    experts                         all of a layer in one tensor (E, N, K)
    norms, biases, sinks, routers   float32
    config.json                     keys of the header; without the tokenizer

The header is read back before anything is written: its keys must give the config of the source, and its
tensors the names of the source. llama.cpp has no other place for a setting, so that a model is refused whose
config has one without a key.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qload.conversion.output_files import (
    Chunk,
    OutputFile,
    OutputItem,
    copy_tensor,
    group_by_size,
    rename_tensors,
    tensor_names,
)
from qload.conversion.stacked_experts import stack_tensors
from qload.conversion.targets import GGUF, OutputLayers
from qload.detect.gguf import (
    ARCHITECTURES,
    ENDS,
    HEADS,
    MIXTRAL,
    NAMES,
    ROPE_FACTORS,
    GGUFArchitecture,
    config_of_keys,
    llama3_factors,
    name_tensors,
    scaling_of_factors,
)
from qload.errors import QloadError, RepackError
from qload.experts.stack_finder import StoredStack
from qload.experts.stack_layouts import Slot
from qload.models.config import TextConfig, text_config
from qload.spec import named
from qload.storage import BLOCK_TYPES, TensorInfo
from qload.storage.gguf import SPLIT_COUNT, SPLIT_NUMBER, SPLIT_TENSORS, typed_name
from qload.storage.gguf_header import GGUFHeader, parse_gguf_header
from qload.storage.gguf_types import GGML_TYPES, GGMLType
from qload.storage.gguf_writer import Scalar, Value, aligned, encode_header
from qload.verify.checkpoint import VerifiedCheckpoint

LLAMA = "llama"
WRITTEN_TYPES: Mapping[str, str] = {  # model_type -> general.architecture
    **dict.fromkeys(("llama", "mistral", "mixtral"), LLAMA),
    **{ARCHITECTURES[name].model_type: name for name in ("qwen2", "qwen3", "qwen3moe", "gpt-oss")},
}
QUANTIZATION_VERSION = 2  # of ggml's blocks
U16, I32, MAX_U32 = 2, 5, (1 << 32) - 1  # types of keys, and the largest value of integers
FLOAT_TYPES = {kind.dtype: kind for kind in GGML_TYPES.values() if kind.dtype in ("F32", "F16", "BF16")}
DTYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
BLOCK = re.compile(r"model\.layers\.([0-9]+)\.(.+)")
UNCOMPARED = ("type", "architecture", "eos", "dtype")  # fields of a config without a key in the header
ROUTER = "ffn_gate_inp"  # float32 in files of llama.cpp
SINGLE_FILE = "model.gguf"
NO_TOKENIZER = (
    "the GGUF file has no tokenizer (tokenizer.ggml.model is none): llama.cpp reads the model, and evaluates "
    "ids of tokens alone"
)


@dataclass(frozen=True)
class GGUFFile(OutputFile):
    """A GGUF file: its keys, and the types of its tensors by name."""

    keys: Mapping[str, Value]
    types: Mapping[str, GGMLType]

    @cached_property
    def header(self) -> bytes:
        """Header of the file, padded to the alignment."""
        entries, start = {}, 0
        for name, info in self.tensors.items():
            entries[name] = self.types[name].name, _shape(self.types[name], info), start
            start += aligned(info.nbytes)
        return encode_header(self.keys, entries)

    @cached_property
    def offsets(self) -> Mapping[str, int]:
        """Offset of each tensor from the start of the file, in bytes."""
        offset, offsets = len(self.header), {}
        for name, info in self.tensors.items():
            offsets[name] = offset
            offset += aligned(info.nbytes)
        return offsets

    @cached_property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return len(self.header) + sum(aligned(info.nbytes) for info in self.tensors.values())


def _shape(kind: GGMLType, info: TensorInfo) -> tuple[int, ...]:
    """Return the shape in elements."""
    return info.shape if kind.dtype else (*info.shape[:-2], info.shape[-2] * kind.elements)


@dataclass(frozen=True)
class GGUFModel:
    """Contents of a GGUF model: items, keys, and the types of tensors by name."""

    items: Sequence[OutputItem]
    keys: Mapping[str, Value]
    types: Mapping[str, GGMLType]

    def files(self, max_bytes: int) -> list[GGUFFile]:
        """Return the files of at most `max_bytes`, in the names and with the keys of a split model."""
        groups = group_by_size(self.items, max_bytes)
        if len(groups) == 1:
            return [GGUFFile(SINGLE_FILE, groups[0], self.keys, self.types)]
        files = []
        for number, items in enumerate(groups):
            split = {
                SPLIT_NUMBER: Scalar(U16, number),
                SPLIT_COUNT: Scalar(U16, len(groups)),
                SPLIT_TENSORS: Scalar(I32, len(self.types)),
            }
            name = f"model-{number + 1:05d}-of-{len(groups):05d}.gguf"
            files.append(GGUFFile(name, items, {**({} if number else self.keys), **split}, self.types))
        return files


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor of an item, with its name and type in the file; `expert` is its number in a stack."""

    stored: str
    item: OutputItem
    name: str
    type: GGMLType
    expert: int | None = None

    @property
    def info(self) -> TensorInfo:
        """Dtype and shape."""
        return self.item.tensors[self.stored]


def plan_model(source: VerifiedCheckpoint, layers: OutputLayers, left_out: Collection[str]) -> GGUFModel:
    """Plan the GGUF model of a checkpoint with its converted layers.

    RepackError for a model or a tensor that llama.cpp cannot represent; its source is "" for a model.
    """
    kind = source.architecture.type if source.architecture else source.model_config.get("model_type")
    if kind not in WRITTEN_TYPES:
        written = ", ".join(sorted(WRITTEN_TYPES))
        raise RepackError("", GGUF, f"GGUF is written for the model types {written}, not for {kind!s:.80}")
    config = _text_config(source.model_config)
    lead = WRITTEN_TYPES[config.type]
    known = MIXTRAL if config.type == "mixtral" else ARCHITECTURES[lead]
    placed = [*_place_layers(source, layers, known, config)]
    placed += _place_others(source, layers, known, config, {*left_out, ROPE_FACTORS})
    items, types = _items(placed, known), {each.name: each.type for each in placed}
    if config.rope.type == "llama3":
        items.append(_rope_factors(config))
        types[ROPE_FACTORS] = FLOAT_TYPES["F32"]
    keys = dict(_keys(config, lead))
    for key, value in keys.items():
        if isinstance(value, int) and value > MAX_U32:
            raise RepackError("", GGUF, f"{key} is {value}, and this key of GGUF has 32 bits")
    model = GGUFModel(items, keys, types)
    _check_header(model, config, {each.stored for each in placed})
    return model


def _place_layers(
    source: VerifiedCheckpoint, layers: OutputLayers, known: GGUFArchitecture, config: TextConfig
) -> Iterator[PlacedTensor]:
    """Yield the tensors of converted layers."""
    for prefix, layer in layers.items():
        kind = BLOCK_TYPES[layer.config.type]
        assert layer.item is not None
        blocks = named(prefix, kind.suffix)
        name, expert = _name_in_file(known, named(prefix, "weight"))
        item = _reorder(layer.item, blocks, name, known, config)
        for stored in item.tensors:
            if stored == blocks:
                yield PlacedTensor(stored, item, name, kind, expert)
            else:
                scale = f"{name.removesuffix('weight')}scale"
                yield PlacedTensor(stored, item, scale, FLOAT_TYPES["F32"], expert)


def _place_others(
    source: VerifiedCheckpoint,
    layers: OutputLayers,
    known: GGUFArchitecture,
    config: TextConfig,
    left_out: Collection[str],
) -> Iterator[PlacedTensor]:
    """Yield the tensors outside of converted layers."""
    storage, replaced = source.weights.storage, {*left_out}
    names = storage.keys()
    for prefix in layers:
        replaced.update(tensor_names(source, prefix))
    for stored in names:
        if stored in replaced:
            continue
        info = storage.info(stored)
        if info.dtype not in DTYPE_NAMES:
            raise RepackError(
                stored, GGUF, f"it is {info.stored_dtype}; llama.cpp has plain tensors of floats"
            )
        name, expert = _name_in_file(known, stored)
        item, kind = copy_tensor(storage, stored), FLOAT_TYPES[DTYPE_NAMES[info.dtype]]
        if len(info.shape) == 1 or ROUTER in name:
            kind = FLOAT_TYPES["F32"]
            item = _change(item, stored, TensorInfo(torch.float32, info.shape), Tensor.float)
        yield PlacedTensor(stored, _reorder(item, stored, name, known, config), name, kind, expert)


def _name_in_file(known: GGUFArchitecture, name: str) -> tuple[str, int | None]:
    """Return the name in the file, and the number of an expert; RepackError without a name."""
    module, _, suffix = name.rpartition(".")
    ends = {ours: theirs for theirs, ours in ENDS.items()}
    whole = {ours: theirs for theirs, ours in known.tensors.items()}
    stems = {ours: theirs for theirs, ours in {**NAMES, **known.names}.items()}
    experts = {ours: theirs for theirs, ours in known.experts.items()}
    if module in ends:
        return f"{ends[module]}.{suffix}", None
    block = BLOCK.fullmatch(name)
    if block is not None and block[2] in whole:
        return f"blk.{block[1]}.{whole[block[2]]}", None
    block = BLOCK.fullmatch(module)
    if block is not None:
        number, place = block.groups()
        if place in stems:
            return f"blk.{number}.{stems[place]}.{suffix}", None
        lead, _, rest = place.removeprefix(f"{known.experts_lead}.").partition(".")
        if place.startswith(f"{known.experts_lead}.") and lead.isdecimal() and rest in experts:
            return f"blk.{number}.{experts[rest]}.{suffix}", int(lead)
    raise RepackError(name, GGUF, f"llama.cpp has no name for {name} in a model of this type")


def _reorder(
    item: OutputItem, stored: str, name: str, known: GGUFArchitecture, config: TextConfig
) -> OutputItem:
    """Return an item with the rows of queries and keys in the order of llama.cpp."""
    stem = name.split(".")[-2]
    if not known.interleaved or stem not in HEADS:
        return item
    heads = config.heads if stem == "attn_q" else config.kv_heads
    info = item.tensors[stored]
    if info.shape[0] % (2 * heads):
        reason = f"its {info.shape[0]} outputs are not {heads} heads of an even size"
        raise RepackError(stored, GGUF, reason)

    def interleave(rows: Tensor) -> Tensor:
        return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)

    return _change(item, stored, info, interleave)


def _change(item: OutputItem, name: str, info: TensorInfo, change: Callable[[Tensor], Tensor]) -> OutputItem:
    """Return an item with one whole tensor changed to dtype and shape of `info`."""

    def read() -> Iterator[Chunk]:
        parts = []
        for stored, offset, chunk in item.read():
            if stored == name:
                parts.append(chunk.reshape(-1))
            else:
                yield stored, offset, chunk
        yield name, 0, change(torch.cat(parts).reshape(item.tensors[name].shape))

    memory_bytes = item.memory_bytes + 2 * item.tensors[name].nbytes + info.nbytes
    return OutputItem({**item.tensors, name: info}, item.source_bytes, read, memory_bytes)


def _items(placed: Sequence[PlacedTensor], known: GGUFArchitecture) -> list[OutputItem]:
    """Return the items under the names of the file, with all experts of a matrix in one tensor."""
    single = [each for each in placed if each.expert is None]
    names = {each.stored: each.name for each in single}
    items = [rename_tensors(item, names) for item in {id(each.item): each.item for each in single}.values()]
    matrices: dict[str, list[PlacedTensor]] = {}
    for each in placed:
        if each.expert is not None:
            matrices.setdefault(each.name.rpartition(".")[0], []).append(each)
    return items + [_stack(matrix, known) for matrix in matrices.values()]


def _stack(group: Sequence[PlacedTensor], known: GGUFArchitecture) -> OutputItem:
    """Return the item of one matrix of all experts; RepackError unless types, shapes and numbers agree."""
    by_name: dict[str, list[PlacedTensor]] = {}
    for each in group:
        by_name.setdefault(each.name, []).append(each)
    count = max(each.expert for each in group if each.expert is not None) + 1
    tensors, stacks = {}, []
    for name, members in by_name.items():
        first = members[0]
        other = next((each for each in members if (each.type, each.info) != (first.type, first.info)), None)
        if other is not None:
            reason = f"{name} has one type and shape for all experts, and {first.stored} is {first.type.name}"
            raise RepackError(other.stored, GGUF, reason)
        if len(members) != count:
            raise RepackError(
                first.stored, GGUF, f"{name} has {count} experts, and {len(members)} are stored"
            )
        lead, _, part = first.stored.partition(f".{known.experts_lead}.")
        part = part.partition(".")[2]
        shape = first.info.shape if first.info.shape != (1,) else ()
        tensors[name] = TensorInfo(first.info.stored_dtype, (count, *shape))
        places = {part: Slot(name, first.info)}
        lead = f"{lead}.{known.experts_lead}"
        stacks.append(StoredStack(lead, part.partition(".")[0], name, count, places, part.rpartition(".")[2]))
    items = {id(each.item): each.item for each in group}
    return stack_tensors(tensors, stacks, list(items.values()))


def _rope_factors(config: TextConfig) -> OutputItem:
    """Return the item of the divisors of rope's frequencies, for the scaling of Llama 3."""
    factors = llama3_factors(config.rope.theta, config.rope.dim, config.rope.factor)
    tensor = torch.from_numpy(factors.astype(np.float32))
    return OutputItem(
        {ROPE_FACTORS: TensorInfo(torch.float32, tuple(tensor.shape))},
        0,
        lambda: iter([(ROPE_FACTORS, 0, tensor)]),
    )


def _keys(config: TextConfig, lead: str) -> Iterator[tuple[str, Value]]:
    """Yield the keys of the header."""
    yield "general.architecture", lead
    yield "general.type", "model"
    yield "general.quantization_version", QUANTIZATION_VERSION
    values: dict[str, Value] = {
        "block_count": config.layers,
        "context_length": config.positions,
        "embedding_length": config.hidden,
        "feed_forward_length": config.inner or config.expert_inner,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.v_head_dim,
        "attention.layer_norm_rms_epsilon": float(config.eps),
        "rope.freq_base": float(config.rope.theta),
        "rope.dimension_count": config.rope.dim,
        "vocab_size": config.vocab,
    }
    if config.routing is not None:
        values["expert_count"] = config.routing.experts
        values["expert_used_count"] = config.routing.top_k
        if lead != LLAMA:  # its own key gives the size of its experts
            values["expert_feed_forward_length"] = config.expert_inner
    if config.rope.type in ("linear", "yarn"):
        values["rope.scaling.type"] = config.rope.type
        values["rope.scaling.factor"] = float(config.rope.factor)
        values["rope.scaling.original_context_length"] = config.rope.original
    windows = {mask.window for mask in config.masks if mask.window}
    if config.family.windows == "alternating" and windows:
        values["attention.sliding_window"] = max(windows)
    yield from ((f"{lead}.{key}", value) for key, value in values.items())
    yield "tokenizer.ggml.model", "none"
    if len(config.eos) == 1 and 0 <= config.eos[0] < config.vocab:
        yield "tokenizer.ggml.eos_token_id", config.eos[0]


def _check_header(model: GGUFModel, config: TextConfig, names: Collection[str]) -> None:
    """Read the header; RepackError if it gives another config, or other names of tensors."""
    (file,) = model.files(sum(item.nbytes for item in model.items))
    header = file.header

    def fetch(at: int, count: int) -> bytes:
        return header[at : at + count].ljust(count, b"\0")

    parsed = parse_gguf_header(fetch, file.nbytes, file.name)
    read = _read_config(parsed, config)
    for each in fields(TextConfig):
        wanted, found = _as_stored(getattr(config, each.name)), _as_stored(getattr(read, each.name))
        if each.name not in UNCOMPARED and wanted != found:
            reason = f"no key of GGUF states its {each.name}: {wanted!s:.200}, and not {found!s:.200}"
            raise RepackError("", GGUF, reason)
    views = name_tensors(parsed.keys, parsed.tensors, file.name)
    read_names = {typed_name(name, parsed.tensors[view.source].type) for name, view in views.items()}
    others = sorted((read_names - {ROPE_FACTORS}) ^ {*names})
    if others:
        raise RepackError(others[0], GGUF, "its name in a GGUF file is read as another")


def _read_config(header: GGUFHeader, config: TextConfig) -> TextConfig:
    """Return the config of a header, from its keys."""
    read = config_of_keys(header.keys, header.tensors)
    if ROPE_FACTORS in header.tensors:
        factors = llama3_factors(config.rope.theta, config.rope.dim, config.rope.factor)
        read["rope_scaling"] = scaling_of_factors(factors.astype(np.float32), read)
    return _text_config(read)


def _text_config(values: Mapping[str, Any]) -> TextConfig:
    """Parse a config; RepackError for invalid values."""
    try:
        return text_config(values)
    except QloadError as error:
        raise RepackError("", GGUF, str(error)) from error


def _as_stored(value: Any) -> Any:
    """Return a value of a config with its numbers in float32, as in keys."""
    if is_dataclass(value):
        return {each.name: _as_stored(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple):
        return tuple(map(_as_stored, value))
    return float(np.float32(value)) if isinstance(value, float) else value
