"""EXL3: a trellis of 16-bit states, between Hadamard matrices and scales of inputs and outputs.

On disk, for a layer of K inputs and N outputs with k bits per weight, K and N multiples of 128:

    trellis  int16  (K/16, N/16, 16*k)  states in tiles; k 1 to 8, or 1.5, 2.5, 3.5 with mul1
    suh      fp16   (K,)                scales of inputs
    svh      fp16   (N,)                scales of outputs
    su       int16  (K/16,)             signs of inputs, in older files: a bit of 1 is -1, lowest bit first
    sv       int16  (N/16,)             signs of outputs, likewise
    mcg      int32  ()                  0xCBAC1FED: the codebook is mcg
    mul1     int32  ()                  0x83DCD12D: the codebook is mul1; without either it is 3inst

    w = diag(svh) @ H @ values(states) @ H @ diag(suh)

H is block-diagonal, of Hadamard matrices of 128 over sqrt(128). The values are fp16, sums are in float64, and
the result is rounded once; exllamav3 rounds to fp16 between the steps. A layer is cut at multiples of 128.
Layers are fused only with equal bits, codebooks and scales of inputs; load others as separate layers.

`qload.layouts.exl3` decodes states. Source: exllamav3 1.6.5.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from qload import configs, dtypes, spec
from qload.dtypes import TORCH, DtypeLike
from qload.errors import MismatchError, MissingTensorError, ShapeError, TwoFormatsError
from qload.layouts.exl3 import MULTIPLIERS, STATE_BITS, TILE, Codebook, decode_states, state_values
from qload.lazy_torch import Tensor, torch
from qload.loader import ConfiguredFormat
from qload.spec import Role, TensorSpec
from qload.spec.casts import check_float
from qload.spec.tensor import array_of
from qload.spec.transforms import walsh_hadamard

BLOCK = 128  # inputs and outputs of a Hadamard matrix
MARKERS: tuple[Codebook, ...] = ("mcg", "mul1")
HALF_STEPS = (1.5, 2.5, 3.5)
BITS = (*range(1, 9), *HALF_STEPS)
BLOCK_ELEMENTS = 1 << 21  # weights in float64 at once


@dataclass(frozen=True)
class Exl3Config(spec.Config):
    """Config of EXL3: empty beforehand, because the tensors describe themselves.

    Attributes
    ----------
    bits
        Bits per weight; 0: this and the other settings are read from the tensors.
    codebook
        Codebook of the states.
    inputs, outputs
        Tensor with the scales, or the signs, of inputs and of outputs.
    stated
        Codebook in the checkpoint's config, for a note.
    """

    name: ClassVar[str] = "exl3"

    bits: float = 0
    codebook: Codebook = "3inst"
    inputs: Literal["suh", "su"] = "suh"
    outputs: Literal["svh", "sv"] = "svh"
    stated: str | None = field(default=None, repr=False, compare=False)

    def for_layer(self, headers: spec.LayerHeaders) -> Exl3Config:
        """Read the settings of a layer.

        ShapeError for a trellis of other bits; MismatchError for a marker with another multiplier, for a
        missing one of the config's codebook, and for half a bit without mul1; MissingTensorError or
        TwoFormatsError for scales of inputs or outputs.
        """
        headers.sizes(Exl3Weight.tensors(self))
        codebook, bits = _read_codebook(headers), _read_bits(headers)
        if codebook == "3inst" and self.stated in MARKERS:
            marker, got = headers.names.full(self.stated), "3inst, as no marker is stored"
            remedy = "remedy   fetch the file again, or state the codebook 3inst in the config"
            raise MismatchError(marker, "codebook", f"{self.stated}, as the config states", got, remedy)
        if bits in HALF_STEPS and codebook != "mul1":
            name, what = headers.names.full("trellis"), f"{bits} bits per weight"
            raise MismatchError(name, what, "whole bits, or the codebook mul1", f"the codebook {codebook}")
        inputs, outputs = _stored_field(headers, "suh", "su"), _stored_field(headers, "svh", "sv")
        return replace(self, bits=bits, codebook=codebook, inputs=inputs, outputs=outputs)

    def notes(self, headers: spec.LayerHeaders) -> tuple[str, ...]:
        """Note on another codebook in the checkpoint's config."""
        codebook = _read_codebook(headers)
        if self.stated in (None, codebook):
            return ()
        return (f"the codebook is {codebook} by the tensors; {self.stated} of the config is not used",)


@dataclass(frozen=True, eq=False, repr=False)
class Exl3Weight(spec.Weight):
    """An EXL3 layer, or a share of one.

    w = diag(svh) @ H @ values(states) @ H @ diag(suh), H block-diagonal of Hadamard matrices of 128 over
    sqrt(128). Source: exllamav3, which rounds to fp16 between the steps.

    Attributes
    ----------
    trellis
        States in tiles of 16 inputs and 16 outputs: (K / 16, N / 16, 16 * bits), int16.
    suh, svh
        Scales of inputs (K,) and outputs (N,), fp16; None: signs in `su` and `sv`.
    su, sv
        Signs of inputs (K / 16,) and outputs (N / 16,), bits of int16; None: scales in `suh` and `svh`.
    mcg, mul1
        Multiplier of the codebook, one per fused part, int32; None for other codebooks.
    """

    config: Exl3Config
    trellis: Tensor
    suh: Tensor | None = None
    svh: Tensor | None = None
    su: Tensor | None = None
    sv: Tensor | None = None
    mcg: Tensor | None = None
    mul1: Tensor | None = None

    format: ClassVar[str] = "exl3"
    padded_to: ClassVar[int] = BLOCK
    example: ClassVar[Exl3Config] = Exl3Config(4, "mul1")
    further: ClassVar[tuple[Exl3Config, ...]] = (Exl3Config(3, "mcg", "su", "sv"),)

    @classmethod
    def tensors(cls, config: Exl3Config) -> tuple[TensorSpec, ...]:
        """Declare the tensors; cuts fall between Hadamard matrices."""
        width, optional = f"{int(TILE * config.bits)}" if config.bits else "W", not config.bits
        half, short, word = (dtypes.float16,), (dtypes.int16,), (dtypes.int32,)
        others = (
            TensorSpec("suh", half, "K", Role.SCALE, fact=True, signed=True, optional=optional),
            TensorSpec("su", short, f"K/{TILE}", Role.WORD, fact=True, optional=optional),
            TensorSpec("svh", half, "N", Role.SCALE, signed=True, optional=optional),
            TensorSpec("sv", short, f"N/{TILE}", Role.WORD, optional=optional),
            *(TensorSpec(name, word, "P", Role.WORD, fact=True, optional=optional) for name in MARKERS),
        )
        stored = (config.inputs, config.outputs, config.codebook)
        return (
            TensorSpec("trellis", short, f"K@{BLOCK}/{TILE} N@{BLOCK}/{TILE} {width}", Role.WORD),
            *(each for each in others if optional or each.name in stored),
        )

    @property
    def codes_are_transformed(self) -> bool:
        """Return True: codes are between Hadamard matrices and scales."""
        return True

    def codes(self) -> spec.Codes:
        """Return the states and their values, without Hadamard matrices and scales."""
        return spec.Codes(
            bits=STATE_BITS,
            codes=decode_states(self.trellis, self.config.bits),
            scales=torch.ones(1, 1, device=self.device),
            zeros=None,
            k_group=None,
            lookup=state_values(self.config.codebook, self.device),
        )

    def dequantize(self, dtype: DtypeLike = dtypes.float32, out: Tensor | None = None) -> Tensor:
        """Dequantize to (N, K) in float32, with sums in float64, rounded once to any other `dtype`."""
        check_float(dtype)
        if out is None:
            out = torch.empty(self.shape, dtype=TORCH[dtype], device=self.device)
        else:
            spec.check_out(out, self.shape, self.device, *self.fields().values())
        values = state_values(self.config.codebook, self.device).double()
        inputs, outputs = _as_scales(self.suh, self.su), _as_scales(self.svh, self.sv)
        outputs = outputs[:, None] / BLOCK  # both matrices are sqrt(128) times too large
        matrix = walsh_hadamard(torch.eye(BLOCK, dtype=torch.float64, device=self.device))
        K = self.layer.K
        step = max(1, BLOCK_ELEMENTS // (BLOCK * max(1, K))) * BLOCK
        for start in range(0, self.layer.N, step):
            tiles = self.trellis[:, start // TILE : (start + step) // TILE]
            states = decode_states(tiles, self.config.bits).long()
            wide = matrix @ values[states].reshape(len(states) // BLOCK, BLOCK, K)
            wide = (wide.reshape(len(states), K // BLOCK, BLOCK) @ matrix).reshape(len(states), K)
            out[start : start + step] = (wide * inputs * outputs[start : start + step]).float()
        return out

    @classmethod
    def sample_facts(cls, config: Exl3Config, sizes: dict[str, int]) -> dict[str, Tensor]:
        """Marker of the codebook, and scales or signs of inputs by K; raises N and K to multiples of 128."""
        sizes["N"], sizes["K"] = cls.pad(sizes["N"], sizes["K"])
        sizes["W"] = 4 * TILE
        order = torch.arange(sizes["K"])
        signs, scales = order[: len(order) // TILE].to(torch.int16) * 4099, 2.0 ** (order % 4 - 2)
        facts = {"su": signs, "suh": scales.half()}
        for name in MARKERS:
            facts[name] = torch.tensor([MULTIPLIERS[name] - (1 << 32)], dtype=torch.int32)
        return {spec.name: facts[spec.name] for spec in cls.tensors(config) if spec.fact and config.bits}


def _as_scales(scales: Tensor | None, signs: Tensor | None) -> Tensor:
    """Scales in float64, of int16 signs (n,) -> (16 * n,): -1 for a bit of 1, lowest bit first."""
    if signs is None:
        assert scales is not None  # by the config
        return scales.double()
    bits = signs[:, None].to(torch.int32) >> torch.arange(TILE, device=signs.device) & 1
    return (1 - 2 * bits).flatten().double()


def _read_codebook(headers: spec.LayerHeaders) -> Codebook:
    """Codebook by its marker; TwoFormatsError for two markers, MismatchError for another multiplier."""
    stored = [name for name in MARKERS if name in headers.shapes]
    if len(stored) > 1:
        full = headers.names.full(stored[0])
        raise TwoFormatsError(full, "markers of two codebooks", "either mcg or mul1", "mcg and mul1")
    for name in stored:
        full, expected = headers.names.full(name), MULTIPLIERS[name]
        for multiplier in array_of(full, headers.facts[name]).flatten().view(np.uint32).tolist():
            if multiplier != expected:
                got = f"0x{multiplier:08X}"
                raise MismatchError(full, "multiplier of the codebook", f"0x{expected:08X}", got)
    return stored[0] if stored else "3inst"


def _read_bits(headers: spec.LayerHeaders) -> float:
    """Bits per weight by the width of a tile; ShapeError for a width of no bits."""
    shape = headers.shapes["trellis"]
    bits = shape[-1] / TILE
    if bits not in BITS:
        expected = f"({shape[0]}, {shape[1]}, W), W 16 to 128 in steps of 16, or 24, 40, 56"
        full, file = headers.names.full("trellis"), headers.names.file("trellis")
        raise ShapeError(full, expected, shape, file, f"{bits:g} bits per weight")
    return bits if bits in HALF_STEPS else int(bits)


def _stored_field(headers: spec.LayerHeaders, scales: str, signs: str) -> Any:
    """Name of the stored one of two tensors; MissingTensorError for none, TwoFormatsError for both."""
    stored = [name for name in (scales, signs) if name in headers.shapes]
    if not stored:
        hint = f"EXL3 stores {scales}, or in older files {signs}"
        raise MissingTensorError(headers.names.full(scales), hint=hint)
    if len(stored) > 1:
        full, what = headers.names.full(scales), "stored beside signs of the same"
        raise TwoFormatsError(full, what, f"either {scales} or {signs}", f"{scales} and {signs}")
    return stored[0]


class _EXL3(configs.Section):
    version: configs.Name = None
    bits: Annotated[float, Field(gt=0, le=16, allow_inf_nan=False)] | None = None  # mean over all layers
    head_bits: Annotated[float, Field(gt=0, le=16, allow_inf_nan=False)] | None = None
    codebook: Codebook | None = None


def read_exl3(source: configs.FoundConfig) -> configs.Claims:
    """Read the claims of `quant_method: exl3`: none about layers, which describe themselves."""
    section = configs.validate(_EXL3, source)
    fmt = ConfiguredFormat(Exl3Weight, Exl3Config(stated=section.codebook))
    return section.claims(source, "exl3", section.codebook or "exl3", fmt)


def dialects(formats: tuple[ConfiguredFormat, ...]) -> tuple[ConfiguredFormat, ...]:
    """EXL3, by the names of its tensors."""
    return (ConfiguredFormat(Exl3Weight, Exl3Config()),)


FORMATS = (Exl3Weight,)
METHODS = (configs.Method(names=("exl3",), read=read_exl3, formats=FORMATS, variants=("exl3",)),)
