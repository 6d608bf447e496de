"""Settings of a layer of HQQ, each a tensor on disk under the prefix of the layer (`formats.hqq.weight`)."""

from __future__ import annotations

from typing import Any

from qload import dtypes, spec
from qload.dtypes import STORED, DtypeLike
from qload.errors import UnsupportedFormatError
from qload.lazy_torch import Tensor, torch
from qload.spec import Role, TensorSpec
from qload.spec.tensor import array_of

CODES, PACKING, GROUP_SIZE = "W_q", "packing", "group_size_setting"
BITS = (1, 2, 3, 4, 5, 6, 8)
FLOATS = (dtypes.float16, dtypes.bfloat16, dtypes.float32)
WORDS = (dtypes.uint8, dtypes.int32)
NUMBERS = (dtypes.int32, dtypes.int64, dtypes.uint8)
TERNARY = 1.58  # bits of codes that are packed as 2
PACKED_AS = {1: "1bit_u8", 2: "2bit_u8", 3: "3bit_32", 4: "4bit_u8", 5: "8bit_u8", 6: "8bit_u8", 8: "8bit_u8"}
MAX_SIZE = (1 << 31) - 1  # inputs or outputs
MAX_TEXT = 64  # bytes of a setting
SETTINGS = tuple(
    TensorSpec(f"{name}_setting", stored, text, Role.UNUSED, name, fact=True, spent=True, optional=optional)
    for name, stored, text, optional in (
        ("shape", (dtypes.int64,), "2", False),
        ("nbits", (*NUMBERS, dtypes.float32), "P", False),
        (PACKING, (dtypes.uint8,), "S", False),
        ("compute_dtype", (dtypes.uint8,), "T", False),
        ("axis", NUMBERS, "P", False),
        *(
            (name, NUMBERS, "P", True)
            for name in ("group_size", "view_as_float", "channel_wise", "quant_scale", "quant_zero")
        ),
    )
)
ELSEWHERE = "hqq loads it, and its dequantize() gives plain weights"


def read_settings(headers: spec.LayerHeaders) -> dict[str, Any]:
    """Read the fields of the config of a layer; ConfigError with the name of a wrong setting."""
    settings = [setting for setting in SETTINGS if setting.name in headers.facts]
    headers.sizes(settings)
    headers.check_single(setting.name for setting in settings if setting.text == "P")
    values = {
        setting.suffix: array_of(setting.name, headers.facts[setting.name]).reshape(-1)[:MAX_TEXT].tolist()
        for setting in settings
    }
    packing, compute = (bytes(values[name]).decode("ascii", "replace") for name in (PACKING, "compute_dtype"))

    def check(name: str, expected: str, got: str, *, fits: bool) -> None:
        if not fits:
            raise headers.value_error(f"{name}_setting", "value", expected, got)

    for name, wanted in (("quant_scale", 0), ("quant_zero", 0), ("channel_wise", 1)):
        if bool(values.get(name, [wanted])[0]) != wanted:
            reason = f"{headers.names.full(f'{name}_setting')} is {1 - wanted}"
            raise UnsupportedFormatError(f"hqq with {name} {1 - wanted}", reason, remedy=ELSEWHERE)
    (nbits,), (axis,), (N, K) = values["nbits"], values["axis"], values["shape"]
    size, stored = values.get("group_size", [-1])[0], STORED[headers.dtypes["weight"]]
    bits = 2 if abs(nbits - TERNARY) < 1e-3 else int(nbits) if nbits in BITS else 0
    known = {f"torch.{dtype.name}": dtype for dtype in FLOATS}
    check("nbits", f"{', '.join(map(str, BITS))} or {TERNARY}", f"{nbits:g}", fits=bits > 0)
    check("axis", "0 or 1", str(axis), fits=axis in (0, 1))
    check("shape", "outputs and inputs", f"[{N}, {K}]", fits=1 <= min(N, K) <= max(N, K) <= MAX_SIZE)
    fits = size == -1 or (size > 0 and N * K % size == 0)
    check("group_size", f"a divisor of the {N * K} elements", str(size), fits=fits)
    check(PACKING, f"{PACKED_AS[bits]} for {bits} bits", packing, fits=packing == PACKED_AS[bits])
    check("compute_dtype", " or ".join(known), compute, fits=compute in known)
    as_floats = bool(values.get("view_as_float", [stored in FLOATS])[0])
    check("view_as_float", "1, as codes are stored as floats", "0", fits=as_floats or stored in WORDS)
    size = -1 if size == (K if axis else N) else size
    whole = axis == 0 and size != -1 and (N % size != 0 or stored not in WORDS)
    return {
        "bits": bits,
        "group_size": size,
        "axis": axis,
        "compute_dtype": known[compute],
        "stored": stored,
        "whole": whole,
        "N": N,
        "K": K,
    }


def sample_settings(
    bits: int, axis: int, group_size: int, sizes: dict[str, int], compute_dtype: DtypeLike
) -> dict[str, Tensor]:
    """Settings of a layer of N and K of `sizes`, to which lengths of texts are added."""
    numbers = {"nbits": bits, "axis": axis} | ({} if group_size == -1 else {"group_size": group_size})
    facts = {name: torch.tensor([value], dtype=torch.int32) for name, value in numbers.items()}
    texts = {PACKING: PACKED_AS[bits], "compute_dtype": str(compute_dtype)}
    for (name, text), letter in zip(texts.items(), "ST", strict=True):
        facts[name] = torch.tensor(list(text.encode()), dtype=torch.uint8)
        sizes[letter] = len(text)
    facts["shape"] = torch.tensor((sizes["N"], sizes["K"]))
    return {f"{name}_setting": fact for name, fact in facts.items()}
