"""Frozen vectors: small checkpoints as files with their expected weights, and damaged ones.

Layers have known contents, packed by plain arithmetic. Codes differ along K and N, so that any exchange
changes a number. Scales are powers of two, so that the weights are exact in every float type. No case is made
or read by qload's own layouts. The files have the same bytes on every machine.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import save
from torch import Tensor

from qload.errors import ArgumentError
from qload.errors.exceptions import written_to

LAYER = "layer"


@dataclass(frozen=True)
class CaseContent:
    """A case before it is written.

    Attributes
    ----------
    id, format, flags, comment
        As in the manifest.
    config
        The `quantization_config` of `config.json`.
    tensors
        By name without the name of the layer.
    shape
        (N, K).
    expected
        The weight, float32 (N, K); None if the case has to be refused.
    split, world
        The axis and the number of ranks that share the layer.
    raw
        Files by name that are added to those of `config` and `tensors`, or replace them.
    disputed
        Whether programs in use read it differently.
    """

    id: str
    format: str
    flags: tuple[str, ...]
    comment: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    shape: tuple[int, int]
    expected: Tensor | None = None
    split: Literal["N", "K"] | None = None
    world: int = 1
    raw: dict[str, bytes] = field(default_factory=dict)
    disputed: bool = False

    def files(self) -> dict[str, bytes]:
        """Return the files of the checkpoint by name."""
        named = {f"{LAYER}.{name}": tensor.contiguous() for name, tensor in self.tensors.items()}
        config = json.dumps({"quantization_config": self.config}, indent=2, sort_keys=True) + "\n"
        return {"config.json": config.encode(), "model.safetensors": save(named), **self.raw}


WORD_BITS = 32


def fill_codes(N: int, K: int, bits: int) -> Tensor:
    """Return codes (N, K), int64 in [0, 2**bits)."""
    n, k = torch.arange(N)[:, None], torch.arange(K)[None]
    counted: Tensor = (5 * n + 3 * k + k // 8 + n // 16) % 2**bits
    return counted


def fill_zeros(N: int, G: int, bits: int) -> Tensor:
    """Return zero points (N, G), int64 in [1, 2**bits): v1 files store none of them as the largest code."""
    n, g = torch.arange(N)[:, None], torch.arange(G)[None]
    counted: Tensor = 1 + (n + 3 * g) % (2**bits - 1)
    return counted


def fill_scales(N: int, G: int) -> Tensor:
    """Return scales (N, G), float32 powers of two from 2**-6 to 2**-2."""
    n, g = torch.arange(N)[:, None], torch.arange(G)[None]
    return 2.0 ** -((n + 2 * g) % 5 + 2).float()


def pack_words(fields: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack runs of fields along the last axis into int32 words; `order`: the field of each position."""
    count = WORD_BITS // bits
    runs = fields.reshape(*fields.shape[:-1], -1, count)
    places = torch.arange(count) * bits
    words = ((runs if order is None else runs[..., list(order)]) << places).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def dequantize(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    """Return the weight, float32 (N, K): (code - zero) * scale, of the group of each input."""
    return (codes - zeros[:, groups]).float() * scales[:, groups]


N, K, GROUP = 32, 128, 32
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def valid_cases() -> Iterator[CaseContent]:
    """Yield the cases with one correct reading, also in shares between groups."""
    yield from _gptq_cases()
    yield from _awq_cases()
    yield from _packed_cases()
    yield fp8()
    yield nvfp4()


def shared(case: CaseContent) -> Iterator[CaseContent]:
    """Yield the case, and the same for two ranks along each axis."""
    yield case
    for axis in ("N", "K"):
        flags = (*case.flags, "shares")
        split: Any = axis
        yield replace(case, id=f"{case.id}.tp2{axis.lower()}", flags=flags, split=split, world=2)


def gptq(
    id: str,
    flags: tuple[str, ...],
    comment: str,
    *,
    bits: int = 4,
    group: int = GROUP,
    stored_minus: int = 1,
    act_order: bool = False,
    zeros: Tensor | None = None,
) -> CaseContent:
    """Return a GPTQ case: codes packed along K, zero points along N, stored minus `stored_minus`."""
    size = K if group == -1 else group
    codes, scales = fill_codes(N, K, bits), fill_scales(N, K // size)
    zeros = fill_zeros(N, K // size, bits) if zeros is None else zeros
    # In act order, groups of equal size without runs.
    index = torch.arange(K) * 5 % (K // size) if act_order else torch.arange(K) // size
    stored = (zeros - stored_minus) % 2**bits
    return CaseContent(
        id,
        "gptq",
        flags,
        comment,
        {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group,
            "desc_act": act_order,
            "sym": bool((zeros == 2 ** (bits - 1)).all()),
            "checkpoint_format": "gptq" if stored_minus else "gptq_v2",
        },
        {
            "qweight": pack_words(codes, bits).T,
            "qzeros": pack_words(stored.T, bits),
            "scales": scales.T.half(),
            "g_idx": index.int(),
        },
        (N, K),
        dequantize(codes, zeros, scales, index),
    )


def _gptq_cases() -> Iterator[CaseContent]:
    middle = torch.full((N, K // GROUP), 8)
    yield from shared(
        gptq("gptq.v1.w4.g32.sym", ("code-order", "scales"), "What most kernels take.", zeros=middle)
    )
    yield from shared(
        gptq("gptq.v1.w4.g32.zeros", ("zero-point-offset",), "Zero points differ; they are stored minus one.")
    )
    yield gptq(
        "gptq.v2.w4.g32.zeros", ("zero-point-offset",), "Zero points are stored as they are.", stored_minus=0
    )
    yield wrapped()
    yield gptq(
        "gptq.v1.w4.g32.actorder", ("act-order",), "The group of each input is in g_idx.", act_order=True
    )
    yield gptq("gptq.v1.w8.g32.zeros", ("code-width",), "Eight bits.", bits=8)
    yield gptq("gptq.v1.w2.g32.zeros", ("code-width",), "Two bits.", bits=2)
    yield gptq("gptq.v1.w4.channel", ("group-size",), "One group: group_size is -1.", group=-1)


def wrapped() -> CaseContent:
    """Return a case with zero points of 0, stored as 15: GPTQ adds one to whole words, which carries."""
    zeros = fill_zeros(N, K // GROUP, 4) - 1
    case = gptq("gptq.v1.w4.g32.wrapped", ("zero-point-wrap",), "", zeros=zeros)
    raised = (case.tensors["qzeros"].long() & 0xFFFFFFFF) + 0x11111111
    carried = (raised[..., None] >> 4 * torch.arange(8) & 15).flatten(1).T
    codes, scales = fill_codes(N, K, 4), fill_scales(N, K // GROUP)
    return replace(
        case,
        comment="Zero points of 0 are stored as 15. Adding one gives 0, or 16, or carries over fields.",
        expected=dequantize(codes, carried, scales, torch.arange(K) // GROUP),
        disputed=True,
    )


def _awq_cases() -> Iterator[CaseContent]:
    codes, scales = fill_codes(N, K, 4), fill_scales(N, K // GROUP)
    zeros, groups = fill_zeros(N, K // GROUP, 4) - 1, torch.arange(K) // GROUP
    yield from shared(
        CaseContent(
            "awq.w4.g32.zeros",
            "awq",
            ("code-order", "zero-point-offset"),
            "Codes and zero points are packed along N, even ones first, zero points as they are.",
            AWQ_CONFIG,
            {
                "qweight": pack_words(codes.T, 4, AWQ),
                "qzeros": pack_words(zeros.T, 4, AWQ),
                "scales": scales.T.half(),
            },
            (N, K),
            dequantize(codes, zeros, scales, groups),
        )
    )


def _packed_cases() -> Iterator[CaseContent]:
    codes, scales = fill_codes(N, K, 4), fill_scales(N, K // GROUP)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    middle = torch.full((N, K // GROUP), 8)
    yield from shared(
        CaseContent(
            "ct_pack.w4.g32.sym",
            "ct_pack",
            ("code-order", "code-sign"),
            "Codes are packed along K with 8 added; there are no zero points.",
            {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups},
            {
                "weight_packed": pack_words(codes, 4),
                "weight_scale": scales.half(),
                "weight_shape": torch.tensor([N, K]),
            },
            (N, K),
            dequantize(codes, middle, scales, torch.arange(K) // GROUP),
        )
    )


def fp8() -> CaseContent:
    """Return an FP8 case: e4m3 bytes, and a scale for each block of 16 outputs and 32 inputs."""
    values = (fill_codes(N, K, 4) - 8).float() / 4
    scales = fill_scales(N // 16, K // 32)
    wide = scales.repeat_interleave(16, 0).repeat_interleave(32, 1)
    return CaseContent(
        "fp8.block16x32",
        "fp8",
        ("scale-blocks",),
        "Scales of blocks that are not square, so that transposed ones show.",
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]},
        {"weight": values.to(torch.float8_e4m3fn), "weight_scale_inv": scales},
        (N, K),
        values * wide,
    )


def nvfp4() -> CaseContent:
    """Return an NVFP4 case: pairs of e2m1 codes, low bits first, with two levels of scales."""
    codes = fill_codes(N, K, 4)
    table = torch.tensor(E2M1 + tuple(-value for value in E2M1))
    scales, second = fill_scales(N, K // 16), 2.0**-3
    return CaseContent(
        "nvfp4.modelopt",
        "nvfp4",
        ("nibble-order", "second-scale", "float-type"),
        "Every e2m1 code; the scale of the whole tensor multiplies.",
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        {
            "weight": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8),
            "weight_scale": scales.to(torch.float8_e4m3fn),
            "weight_scale_2": torch.tensor(second),
        },
        (N, K),
        table[codes] * scales.repeat_interleave(16, 1) * second,
    )


DTYPE_NAMES = {torch.int32: "I32", torch.float16: "F16"}


def rejected_cases() -> Iterator[CaseContent]:
    """Yield the cases to be refused by every reader: a correct GPTQ layer with one change each."""
    correct = gptq("gptq.v1.w4.g32", (), "")
    changed, raw = partial(_changed, correct), partial(_raw, correct)
    tensors = correct.tensors
    scales, g_idx = tensors["scales"], tensors["g_idx"]
    missing = "missing-tensor"
    yield changed("cut-in-a-group", "shares", "Three ranks: a group would be cut in two.", split="K", world=3)
    yield changed("orphan-scales", missing, "Scales and zero points without codes.", drop=("qweight",))
    yield changed("no-scales", missing, "Codes without scales.", drop=("scales",))
    yield changed("scales-of-other-shape", "shape", "One group of scales too few.", scales=scales[:-1])
    yield changed("scales-transposed", "shape", "Scales stored as (N, G).", scales=scales.T)
    yield changed("scale-nan", "value", "A scale that is no number.", scales=_with_last(scales, torch.nan))
    past, negative = _with_last(g_idx, K // GROUP), _with_last(g_idx, -1)
    yield changed("index-past-the-end", "act-order", "g_idx names a group that is not there.", g_idx=past)
    yield changed("index-negative", "act-order", "g_idx names group -1.", g_idx=negative)
    floats = tensors["qweight"].half()
    yield changed("words-of-floats", "dtype", "Codes stored as float16.", qweight=floats)
    comment = "The config says AWQ, the tensors are GPTQ's."
    yield replace(changed("config-of-another-method", "lying-config", comment), config=AWQ_CONFIG)
    comment = "The config says groups of 64, g_idx says 32."
    other_groups = {**correct.config, "group_size": 2 * GROUP}
    yield replace(changed("config-of-other-groups", "lying-config", comment), config=other_groups)
    yield raw("duplicate-tensor", "duplicate-key", "One name twice in the header.", _duplicate(tensors))
    yield raw("offsets-overlap", "file", "Two tensors share bytes.", _overlapping(tensors))
    yield raw("file-cut-short", "file", "The last bytes are missing.", _file_of(*_entries(tensors))[:-16])


def _changed(
    correct: CaseContent,
    name: str,
    flag: str,
    comment: str,
    *,
    drop: tuple[str, ...] = (),
    split: Any = None,
    world: int = 1,
    **tensors: Tensor,
) -> CaseContent:
    tensors = {key: tensor for key, tensor in {**correct.tensors, **tensors}.items() if key not in drop}
    return replace(
        correct,
        id=f"reject.{name}",
        flags=(flag,),
        comment=comment,
        tensors=tensors,
        expected=None,
        split=split,
        world=world,
    )


def _raw(correct: CaseContent, name: str, flag: str, comment: str, file: bytes) -> CaseContent:
    return replace(_changed(correct, name, flag, comment), raw={"model.safetensors": file})


def _with_last(tensor: Tensor, value: float) -> Tensor:
    changed = tensor.clone(memory_format=torch.contiguous_format)
    changed.view(-1)[-1] = value
    return changed


def _entries(tensors: dict[str, Tensor]) -> tuple[list[tuple[str, dict[str, Any]]], bytes]:
    """The entries of the header in the order of their bytes, and the bytes."""
    entries, data = [], b""
    for name, tensor in tensors.items():
        content = tensor.contiguous().numpy().tobytes()
        entry = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        entries.append((f"{LAYER}.{name}", entry))
        data += content
    return entries, data


def _file_of(entries: list[tuple[str, dict[str, Any]]], data: bytes) -> bytes:
    """A file with any entries, also with a name twice."""
    text = "{" + ",".join(f"{json.dumps(name)}:{json.dumps(entry)}" for name, entry in entries) + "}"
    header = text.encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data


def _duplicate(tensors: dict[str, Tensor]) -> bytes:
    entries, data = _entries(tensors)
    name, entry = entries[-1]
    size = entry["data_offsets"][1] - entry["data_offsets"][0]
    again = {**entry, "data_offsets": [len(data), len(data) + size]}
    return _file_of([*entries, (name, again)], data + bytes(size))


def _overlapping(tensors: dict[str, Tensor]) -> bytes:
    entries, data = _entries(tensors)
    start, stop = entries[1][1]["data_offsets"]
    entries[1][1]["data_offsets"] = [start - 16, stop - 16]
    return _file_of(entries, data)


# Of the vectors: a changed or removed case increases the first number, a new one the second.
VERSION = "1.0.0"


class VectorFile(BaseModel):
    """One file of a case."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(description="Relative to the manifest, with forward slashes.")
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    size: int = Field(ge=0, description="In bytes.")


class VectorCase(BaseModel):
    """One checkpoint with one quantized layer, called `layer`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(description="Stable: the same case in every later version.")
    format: str
    result: Literal["valid", "must-reject", "disputed"] = Field(
        description="disputed: programs in use read it differently; `expected` is how the owner does."
    )
    flags: tuple[str, ...] = Field(description="The classes of bugs that the case is there to find.")
    comment: str
    N: int = Field(description="Outputs of the layer.")
    K: int = Field(description="Inputs of the layer.")
    split: Literal["N", "K"] | None = Field(
        default=None, description="Along which axis `world` ranks share the layer; null: it is read whole."
    )
    world: int = Field(default=1, ge=1)
    files: tuple[VectorFile, ...] = Field(description="The checkpoint: a config.json and safetensors files.")
    expected: VectorFile | None = Field(
        default=None,
        description="Where it may be read: safetensors with `weight`, float32 (N, K), the whole layer.",
    )


class Manifest(BaseModel):
    """All cases of one version."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: str = Field(pattern=r"^\d+\.\d+\.\d+$")
    schema_file: str = "schema.json"
    cases: tuple[VectorCase, ...]


def export(folder: Path) -> Manifest:
    """Write all cases, `manifest.json`, its `schema.json` and `SHA256SUMS` to `folder`.

    ArgumentError unless the folder is missing or empty. After an interrupt or a full disk nothing is left.
    """
    folder = folder.resolve()
    if folder.exists() and any(folder.iterdir()):
        raise ArgumentError("folder", "an empty or a missing folder", str(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with written_to(folder), TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        manifest = _write_all(Path(temporary))
        folder.mkdir(exist_ok=True)
        for path in sorted(Path(temporary).iterdir(), key=Path.is_file):  # the manifest and sums come last
            path.rename(folder / path.name)
    return manifest


def _write_all(folder: Path) -> Manifest:
    cases = tuple(_write_case(case, folder) for case in chain(valid_cases(), rejected_cases()))
    manifest = Manifest(version=VERSION, cases=cases)
    files = [file for case in cases for file in (*case.files, case.expected) if file is not None]
    for name, text in (
        ("manifest.json", manifest.model_dump_json(indent=2)),
        (manifest.schema_file, json.dumps(Manifest.model_json_schema(), indent=2, sort_keys=True)),
    ):
        files.append(_write(folder, name, f"{text}\n".encode()))
    lines = (f"{file.sha256}  {file.path}\n" for file in sorted(files, key=attrgetter("path")))
    _write(folder, "SHA256SUMS", "".join(lines).encode())
    return manifest


def _write_case(case: CaseContent, folder: Path) -> VectorCase:
    files = tuple(_write(folder, f"{case.id}/{name}", data) for name, data in sorted(case.files().items()))
    expected = None
    if case.expected is not None:
        data = save({"weight": case.expected.contiguous()})
        expected = _write(folder, f"{case.id}/expected/weight.safetensors", data)
    return VectorCase(
        id=case.id,
        format=case.format,
        result="must-reject" if expected is None else "disputed" if case.disputed else "valid",
        flags=case.flags,
        comment=case.comment,
        N=case.shape[0],
        K=case.shape[1],
        split=case.split,
        world=case.world,
        files=files,
        expected=expected,
    )


def _write(folder: Path, path: str, data: bytes) -> VectorFile:
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    return VectorFile(path=path, sha256=hashlib.sha256(data).hexdigest(), size=len(data))
