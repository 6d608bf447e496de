"""bitsandbytes 4 bits: NF4 and FP4 in blocks over the flattened weight.

On disk, for a layer of K inputs and N outputs, block size B:

    weight                               uint8  (ceil(N*K/2), 1)  codes, row by row, the first of two in the
                                                                  high bits; or these bytes as another dtype
    weight.absmax                        fp32   (ceil(N*K/B),)    scales; uint8 codes with double quantization
    weight.quant_map                     fp32   (16,)             the value of each code
    weight.quant_state.bitsandbytes__nf4 uint8  (J,)              JSON: block sizes, dtype, N and K
    weight.quant_state.bitsandbytes__fp4 uint8  (J,)              the same for FP4
    weight.nested_absmax                 fp32   (M,)              scales of the quantized scales
    weight.nested_quant_map              fp32   (256,)            values of their codes

    w[n, k] = quant_map[code[e]] * absmax[e / B],   e = n * K + k
    absmax[i] = nested_quant_map[code[i]] * nested_absmax[i / nested_blocksize] + nested_offset

The typed weight has absmax in fp32, because a run of scales does not end at the end of a share. bitsandbytes
rounds w once, to the dtype of the state. Source: bitsandbytes 0.50.2, bit-equal to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from qload import configs, dtypes, spec
from qload.devices import StoredTable
from qload.dtypes import STORED, DtypeLike
from qload.errors import DtypeError, MissingTensorError, ShapeError
from qload.layouts import NibblePairs
from qload.layouts.bnb import TABLES, dynamic_map
from qload.lazy_torch import Tensor, torch
from qload.loader import ConfiguredFormat
from qload.spec import Role, TensorSpec

NF4_BITS = 4
STORAGES = (dtypes.uint8, dtypes.int8, dtypes.float16, dtypes.bfloat16, dtypes.float32, dtypes.float64)
SCALES, BYTES = (dtypes.float32, dtypes.uint8), (dtypes.uint8,)
STATE = "quant_state"
NESTED = ("nested_absmax", "nested_quant_map")

MAX_FLOAT32 = (2 - 2**-23) * 2.0**127
_Size = Annotated[int, Field(ge=1, le=configs.MAX_LAYER_SIZE)]
_Float32 = Annotated[float, Field(ge=-MAX_FLOAT32, le=MAX_FLOAT32, allow_inf_nan=False)]


class _State(BaseModel):
    """Content of `quant_state`; the typed weight has none."""

    model_config = ConfigDict(strict=True, extra="forbid")

    quant_type: Literal["nf4", "fp4"]
    blocksize: _Size
    dtype: Literal["float16", "bfloat16", "float32"]
    shape: tuple[_Size, _Size]
    nested_blocksize: _Size | None = None
    nested_dtype: Literal["float32"] | None = None
    nested_offset: _Float32 | None = None


@dataclass(frozen=True)
class BNB4Config(spec.Config):
    """Config of a bitsandbytes 4-bit layer, mostly from its `quant_state`; the type is needed beforehand.

    Fields that only a load uses, and N, do not prevent layers from being fused.

    Attributes
    ----------
    quant_type
        "nf4" or "fp4".
    blocksize
        Elements per scale, row by row.
    dtype
        Dtype that bitsandbytes rounds to.
    storage
        Stored dtype of the bytes of codes.
    K
        Inputs of the whole layer; required for a weight constructed by hand.
    double_quant
        Claim that scales are quantized too; the tensors decide.
    nested_blocksize, offset
        Quantized scales per second scale (0: scales are not quantized), and the offset added to them.
    N
        Outputs of the whole layer.
    """

    name: ClassVar[str] = "bitsandbytes 4-bit"

    quant_type: Literal["nf4", "fp4"]
    blocksize: int = 64
    dtype: DtypeLike = dtypes.bfloat16
    storage: DtypeLike = dtypes.uint8
    K: int = 0  # of the whole layer
    double_quant: bool | None = field(default=None, compare=False, repr=False)
    nested_blocksize: int = field(default=0, compare=False, repr=False)  # 0: scales are not quantized
    offset: float = field(default=0.0, compare=False, repr=False)
    N: int = field(default=0, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("dtype", "storage"):
            object.__setattr__(self, name, STORED[getattr(self, name)])

    def known(self) -> Mapping[str, int]:
        """Return N and K, if known: a flat shape does not give them."""
        return {"N": self.N, "K": self.K} if self.K else {}

    def for_layer(self, headers: spec.LayerHeaders) -> BNB4Config:
        """Read `quant_state`; without one, N follows from K."""
        spec.check_dtypes(BNB4Weight.tensors(self), headers.dtypes, headers.names)
        config = replace(self, storage=headers.dtypes["weight"])
        if STATE not in headers.facts:
            codes = 2 * prod(headers.shapes["weight"]) * config.storage.itemsize
            return replace(config, N=codes // self.K) if self.K > 1 else config
        state = configs.validate_json_tensor(_State, headers, STATE)
        if state.quant_type != self.quant_type:
            expected = f"{self.quant_type}, as in the name"
            raise headers.value_error(STATE, "quant_type", expected, repr(state.quant_type))
        N, K = state.shape
        nested = _nested(headers, state, -(-N * K // state.blocksize))
        return replace(
            config,
            blocksize=state.blocksize,
            dtype=dtypes.BY_NAME[state.dtype],
            nested_blocksize=nested,
            offset=state.nested_offset or 0.0,
            N=N,
            K=K,
        )

    def notes(self, headers: spec.LayerHeaders) -> tuple[str, ...]:
        """Note on a claim of double quantization that the tensors contradict."""
        if self.double_quant in (None, self.nested_blocksize > 0):
            return ()
        verb = "are" if self.nested_blocksize else "are not"
        claim = str(self.double_quant).lower()
        return (f"bnb_4bit_use_double_quant is {claim}, scales {verb} quantized and are believed",)


@dataclass(frozen=True, eq=False, repr=False)
class BNB4Weight(spec.Weight):
    """Base of NF4 and FP4 layers; DtypeError for scales of another dtype than fp32.

    w[n, k] = quant_map[code[e]] * absmax[e / blocksize], e = n * K + k. Source: bitsandbytes,
    bit-equal to its files after one rounding to the dtype of the state.

    Attributes
    ----------
    weight
        Codes, row by row, the first of two in the high bits: (ceil(N * K / 2), 1), uint8; or these bytes as
        another dtype.
    absmax
        The scale of each block: (ceil(N * K / blocksize),), fp32.
    quant_map
        The value of each code: (16,), fp32.
    """

    config: BNB4Config
    weight: Tensor
    absmax: Tensor
    quant_map: Tensor

    format: ClassVar[str] = "bnb_4bit"
    example: ClassVar[BNB4Config] = BNB4Config("nf4")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.absmax.dtype != torch.float32:
            name = spec.FieldNames(self.layer.name or type(self).__name__).full("absmax")
            raise DtypeError(name, ["float32"], str(self.absmax.dtype).removeprefix("torch."))

    @classmethod
    def tensors(cls, config: BNB4Config) -> tuple[TensorSpec, ...]:
        """Declare flat axes, cut at blocks and bytes; `quant_state` is optional if K is known."""
        size, (scales, nested_map) = config.storage.itemsize, NESTED
        codes = "(NK)/2^" if size == 1 else f"(NK)/2^/{size}"
        blocks, float32 = f"(NK)/{config.blocksize}^", SCALES[:1]
        values, state = TABLES[config.quant_type], f"weight.quant_state.bitsandbytes__{config.quant_type}"
        nested = TensorSpec(
            nested_map, float32, "256", Role.WORD, f"weight.{nested_map}", holds=dynamic_map(), spent=True
        )
        return (
            TensorSpec("weight", STORAGES, f"{codes} 1", Role.WORD),
            TensorSpec("absmax", SCALES, blocks, Role.SCALE, stored="weight.absmax"),
            TensorSpec("quant_map", float32, "16", Role.WORD, stored="weight.quant_map", holds=values),
            TensorSpec(scales, float32, "M", Role.SCALE, f"weight.{scales}", optional=True, spent=True),
            replace(nested, optional=True),
            TensorSpec(STATE, BYTES, "J", Role.WORD, state, True, spent=True, optional=config.K > 0),
        )

    @classmethod
    def resolve(
        cls, config: Any, tensors: Mapping[str, Tensor], bounds: spec.ShareBounds
    ) -> dict[str, Tensor]:
        """Dequantize scales to float32, each by its position in the whole layer."""
        kept = super().resolve(config, tensors, bounds)
        if config.nested_blocksize:
            run = bounds.positions(spec.Axis(f"(NK)/{config.blocksize}^")) // config.nested_blocksize
            outer = tensors["nested_absmax"][run.to(kept["absmax"].device)]
            values = tensors["nested_quant_map"][kept["absmax"].long()]
            kept["absmax"] = values * outer + config.offset
        return kept

    def stored(self) -> StoredTable:
        """Describe the stored order for kernels: codes of a table in flat blocks."""
        codes = self.weight.contiguous().view(torch.uint8)
        return StoredTable(codes, self.quant_map, self.absmax, self.config.blocksize)

    def codes(self) -> spec.Codes:
        """Return codes and their table; a scale for each element if blocks do not end with rows."""
        N, K, B = self.layer.N, self.layer.K, self.config.blocksize
        pairs = self.weight.contiguous().view(torch.uint8).flatten()
        inputs = torch.arange(K, device=pairs.device)
        if K % B == 0 and K % 2 == 0:
            codes = NibblePairs(pairs.reshape(N, K // 2), high_first=True)
            return spec.Codes(NF4_BITS, codes, self.absmax.reshape(N, -1), None, inputs // B, self.quant_map)
        flat = NibblePairs(pairs[None], high_first=True).plain()[0, : N * K]
        scales = self.absmax[torch.arange(N * K, device=pairs.device) // B].reshape(N, K)
        return spec.Codes(NF4_BITS, flat.reshape(N, K), scales, None, inputs, self.quant_map)

    @classmethod
    def sample_facts(cls, config: BNB4Config, sizes: dict[str, int]) -> dict[str, Tensor]:
        """State for `sizes`, table of 16 values, and quantized scales if `config` has them; all exact."""
        N, K, run = sizes["N"], sizes["K"], 256
        state: dict[str, Any] = {"quant_type": config.quant_type, "blocksize": config.blocksize}
        state |= {"dtype": str(config.dtype).removeprefix("torch."), "shape": [N, K]}
        facts = {"quant_map": torch.arange(16) / 8 - 1}
        if config.double_quant:
            blocks = -(-N * K // config.blocksize)
            sizes["M"] = -(-blocks // run)
            state |= {"nested_blocksize": run, "nested_dtype": "float32", "nested_offset": 0.25}
            facts["absmax"] = (torch.arange(blocks) % 256).to(torch.uint8)
            facts["nested_absmax"] = torch.arange(sizes["M"]) + 1.0
            facts["nested_quant_map"] = torch.arange(256) / 256
        return facts | {"quant_state": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)}


@dataclass(frozen=True, eq=False, repr=False)
class BNBNF4Weight(BNB4Weight):
    """A layer of normal floats (NF4), or a share of one."""

    format: ClassVar[str] = "bnb_nf4"


@dataclass(frozen=True, eq=False, repr=False)
class BNBFP4Weight(BNB4Weight):
    """A layer of 4-bit floats (FP4), or a share of one."""

    format: ClassVar[str] = "bnb_fp4"
    example: ClassVar[BNB4Config] = BNB4Config("fp4")


def _nested(headers: spec.LayerHeaders, state: _State, blocks: int) -> int:
    """Scales per second scale, or 0; raise if tensors and state disagree on double quantization."""
    run, stored = state.nested_blocksize, [name for name in NESTED if name in headers.shapes]
    scales, got = dtypes.uint8 if run or stored else dtypes.float32, headers.dtypes["absmax"]
    if got != scales:
        expected, got_name = (str(dtype).removeprefix("torch.") for dtype in (scales, got))
        raise DtypeError(headers.names.full("absmax"), [expected], got_name, headers.names.file("absmax"))
    if not run and not stored:
        return 0
    for name in NESTED:
        if name not in stored:
            raise MissingTensorError(headers.names.full(name), hint="reason   absmax is quantized")
    if run is None or state.nested_offset is None:
        key = "nested_offset" if run else "nested_blocksize"
        raise headers.value_error(STATE, key, "a value, as absmax is quantized", "nothing")
    runs, found_runs = -(-blocks // run), headers.shapes["nested_absmax"]
    if found_runs != (runs,):
        name, file = headers.names.full("nested_absmax"), headers.names.file("nested_absmax")
        raise ShapeError(name, f"({runs},) = (blocks/{run}^,)", found_runs, file, f"for {blocks} blocks")
    return run


def dialects(formats: tuple[ConfiguredFormat, ...]) -> tuple[ConfiguredFormat, ...]:
    """Both 4-bit formats: tensors tell them apart."""
    return (
        ConfiguredFormat(BNBNF4Weight, BNB4Config("nf4")),
        ConfiguredFormat(BNBFP4Weight, BNB4Config("fp4")),
    )


FORMATS = (BNBNF4Weight, BNBFP4Weight)
METHODS = ()  # read by detect.methods
