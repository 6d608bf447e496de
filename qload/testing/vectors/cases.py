"""Cases of the vectors: layers with known contents, packed by plain arithmetic, and damaged ones.

Codes differ along K and N, so that any exchange changes a number. Scales are powers of two, so that the
weights are exact in every float type. No case is made or read by qload's own layouts.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from safetensors.torch import save
from torch import Tensor

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

    def expected_file(self) -> bytes | None:
        """Return the file of the expected weight, or None."""
        return None if self.expected is None else save({"weight": self.expected.contiguous()})


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
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    yield from shared(
        CaseContent(
            "awq.w4.g32.zeros",
            "awq",
            ("code-order", "zero-point-offset"),
            "Codes and zero points are packed along N, even ones first, zero points as they are.",
            config,
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
    tensors = correct.tensors
    yield _changed(
        correct, "cut-in-a-group", "shares", "Three ranks: a group would be cut in two.", split="K", world=3
    )
    yield _changed(
        correct, "orphan-scales", "missing-tensor", "Scales and zero points without codes.", drop=("qweight",)
    )
    yield _changed(correct, "no-scales", "missing-tensor", "Codes without scales.", drop=("scales",))
    yield _changed(
        correct,
        "scales-of-other-shape",
        "shape",
        "One group of scales too few.",
        scales=tensors["scales"][:-1],
    )
    yield _changed(
        correct, "scales-transposed", "shape", "Scales stored as (N, G).", scales=tensors["scales"].T
    )
    yield _changed(
        correct,
        "scale-nan",
        "value",
        "A scale that is no number.",
        scales=_with_last(tensors["scales"], torch.nan),
    )
    yield _changed(
        correct,
        "index-past-the-end",
        "act-order",
        "g_idx names a group that is not there.",
        g_idx=_with_last(tensors["g_idx"], K // GROUP),
    )
    yield _changed(
        correct,
        "index-negative",
        "act-order",
        "g_idx names group -1.",
        g_idx=_with_last(tensors["g_idx"], -1),
    )
    yield _changed(
        correct, "words-of-floats", "dtype", "Codes stored as float16.", qweight=tensors["qweight"].half()
    )
    yield from _contradictions(correct)
    yield _raw(
        correct, "duplicate-tensor", "duplicate-key", "One name twice in the header.", _duplicate(tensors)
    )
    yield _raw(correct, "offsets-overlap", "file", "Two tensors share bytes.", _overlapping(tensors))
    yield _raw(correct, "file-cut-short", "file", "The last bytes are missing.", _file(tensors)[:-16])


def _contradictions(correct: CaseContent) -> Iterator[CaseContent]:
    """Configs that contradict the tensors."""
    yield replace(
        _changed(
            correct,
            "config-of-another-method",
            "lying-config",
            "The config says AWQ, the tensors are GPTQ's.",
        ),
        config={"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    )
    yield replace(
        _changed(
            correct, "config-of-other-groups", "lying-config", "The config says groups of 64, g_idx says 32."
        ),
        config={**correct.config, "group_size": 2 * GROUP},
    )


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


def _file(tensors: dict[str, Tensor]) -> bytes:
    return _file_of(*_entries(tensors))


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
