"""Signatures of unsupported dialects: names, dtypes and shapes of a layer's tensors, and a remedy.

Sources of names and shapes: aqlm 1.1.7, amd-quark 0.13, auto-round 0.16.1, comfy-kitchen 0.2.40, exllamav3
1.6.5, hqq 0.2.8, mlx 0.32.4, modelopt 0.47.0, optimum-quanto 0.2.7, torchao 0.18.0, and transformers 5.23.0
with the programs that it loads for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from qload import dtypes
from qload.dtypes import Dtype
from qload.errors import QloadError
from qload.formats import ROLES
from qload.formats.fp8 import WEIGHTS as FP8
from qload.formats.nvfp4 import LOW_RANK
from qload.formats.unquantized import FLOATS
from qload.spec import Names, Role, TensorSpec
from qload.spec.tensor import solve
from qload.storage import TensorInfo, WeightStorage

# Dtypes in the text of a field.
DTYPES: Mapping[str, tuple[Dtype, ...]] = {
    "u8": (dtypes.uint8,),
    "i8": (dtypes.int8,),
    "i16": (dtypes.int16,),
    "i32": (dtypes.int32,),
    "u32": (dtypes.uint32,),
    "integers": (
        dtypes.uint8,
        dtypes.int8,
        dtypes.int16,
        dtypes.int32,
        dtypes.int64,
        dtypes.uint16,
        dtypes.uint32,
    ),
    "e4m3": (dtypes.float8_e4m3fn,),
    "fp8": FP8,
    "exponents": (dtypes.uint8, dtypes.float8_e8m0fnu),
    "f16": (dtypes.float16,),
    "f32": (dtypes.float32,),
    "floats": FLOATS,
}
FIELD_TEXT = re.compile(r"(?P<suffixes>\S+)(?: (?P<dtypes>[\w|]+))?(?: \((?P<axes>.+)\))?")

COMFY = "ComfyUI runs it; take the model as its authors published it, or its plain safetensors"
TRANSFORMERS = "transformers loads it where {} is installed, and its dequantize() gives plain weights"
MODELOPT = "state the quantization_config of its writer, quant_method modelopt with quant_algo {}"
QUARK = "state the quantization_config of its writer, quant_method quark"
QUANTO = "state quant_method quanto, or keep quanto_qmap.json alone; optimum-quanto writes no other methods"
TORCHAO_DIALECT = "torchao's safetensors"
TORCHAO = (
    "keep the metadata of its headers, which state the class of each layer; transformers loads it where "
    "torchao is installed"
)
TORCHAO_FORMATS = (
    "fp8", "ct_int", "torchao_intx", "torchao_int4", "modelopt_nvfp4", "mxfp8", "ct_mxfp4",
)  # fmt: skip
SOURCE = "qload reads the plain safetensors that it was made from"


@dataclass(frozen=True)
class Field:
    """Tensor of a signature: suffixes, dtypes and axes.

    Attributes
    ----------
    suffixes
        Names after the layer's prefix; of several names exactly one is stored.
    dtypes
        Possible dtypes; () for any.
    axes
        Axis text as in a `TensorSpec`; None: any shape.
    """

    suffixes: tuple[str, ...]
    dtypes: tuple[Dtype, ...]
    axes: str | None

    @classmethod
    def parse(cls, text: str) -> Field:
        """Parse the text of one field, such as "scale|scales floats (G N)"."""
        found = FIELD_TEXT.fullmatch(text)
        assert found is not None, text
        names = found["dtypes"].split("|") if found["dtypes"] else []
        known = tuple(dtype for name in names for dtype in DTYPES[name])
        return cls(tuple(found["suffixes"].split("|")), known, found["axes"])


@dataclass(frozen=True)
class Signature:
    """Tensors that identify the layers of an unsupported dialect.

    Attributes
    ----------
    dialect
        Name of the dialect.
    remedy
        A program for it, or a way to convert it.
    tensors
        Tensors of a layer as text, all required: "weight u8 (N K/2), scale|scales floats, zero" has suffixes,
        dtypes and axes. Opening a checkpoint searches for the first one.
    without
        Suffixes without a tensor in any layer of the dialect.
    unless
        Names of formats. A config with one of them contradicts the dialect: the layer is damaged.
    """

    dialect: str
    remedy: str
    tensors: str
    without: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()

    @cached_property
    def parts(self) -> tuple[Field, ...]:
        """Tensors of a layer."""
        return tuple(map(Field.parse, self.tensors.split(", ")))

    @property
    def marks(self) -> tuple[str, ...]:
        """Suffixes of the first tensor, for the search in a checkpoint."""
        return self.parts[0].suffixes

    def matches(self, layer: LayerTensors) -> bool:
        """Return whether names, dtypes and shapes of a layer's tensors fit the dialect."""
        if any(layer.info(suffix) for suffix in self.without):
            return False
        specs, shapes = [], {}
        for part in self.parts:
            headers = [info for suffix in part.suffixes if (info := layer.info(suffix))]
            if len(headers) != 1 or (part.dtypes and headers[0].stored_dtype not in part.dtypes):
                return False
            if part.axes is not None:
                name = part.suffixes[0]
                specs.append(TensorSpec(name, part.dtypes, part.axes, Role.WORD))
                shapes[name] = headers[0].shape
        try:
            solve(specs, shapes, Names())
        except QloadError:  # shapes do not fit their axes or each other
            return False
        return True


@dataclass(frozen=True)
class LayerTensors:
    """Headers of the tensors under a prefix; each is read once.

    Attributes
    ----------
    prefix
        Name of the layer.
    has, find
        Predicate of stored tensor names, and lookup of a header by name.
    """

    prefix: str
    has: Callable[[str], bool]
    find: Callable[[str], TensorInfo]
    known: dict[str, TensorInfo | None] = field(default_factory=dict)

    @classmethod
    def of_storage(cls, storage: WeightStorage, prefix: str) -> LayerTensors:
        """Tensors of a layer in a storage."""
        return cls(prefix, storage.keys().__contains__, storage.info)

    def info(self, suffix: str) -> TensorInfo | None:
        """Header of the tensor with a suffix; None for a missing tensor."""
        if suffix not in self.known:
            name = f"{self.prefix}.{suffix}" if self.prefix else suffix
            self.known[suffix] = self.find(name) if self.has(name) else None
        return self.known[suffix]


# In order of precedence: the first match counts.
SIGNATURES = (
    Signature("ComfyUI's own layers", COMFY, "comfy_quant u8"),
    Signature("ComfyUI's asym_w4a8_int8", COMFY, "weight_s_channel f32, weight i8 (A B), weight_s_rel"),
    Signature(
        "ComfyUI's awq_w4a16",
        COMFY,
        "weight_zeros floats (G N), weight i8 (N K/2), weight_scale floats (G N)",
    ),
    Signature("ComfyUI's scaled FP8", COMFY, "scale_weight floats, weight fp8 (N K)"),
    Signature(TORCHAO_DIALECT, TORCHAO, "_weight_qdata", unless=TORCHAO_FORMATS),
    Signature(
        "quanto (int8, float8)",
        QUANTO,
        "weight._data i8|fp8 (N K), weight._scale floats (N 1)",
        unless=("quanto", "ct_int", "fp8"),
    ),
    Signature(
        "quanto (int4, int2)",
        QUANTO,
        "weight._data._data u8 (A B), weight._scale floats (G 1), weight._shift floats (G 1)",
        unless=("quanto",),
    ),
    Signature("SINQ", f"the sinq package loads it; {SOURCE}", "W_q integers, scale2|meta.scale2"),
    Signature("HQQ", f"hqq loads it; {SOURCE}", "W_q integers, scale, zero", unless=("hqq",)),
    Signature("EXL3's n-gram tables", f"exllamav3 loads it; {SOURCE}", "signs, trellis i16"),
    Signature("QTIP", f"the QTIP repository loads it; {SOURCE}", "trellis integers, SU, SV"),
    Signature("QuIP#", f"the QuIP# repository loads it; {SOURCE}", "Qidxs integers, SU, SV"),
    Signature(
        "AQLM",
        "state the quantization_config of its writer, quant_method aqlm",
        "codebooks floats (C V O I), codes integers (A B C), scales floats (A 1 1 1)",
        unless=("aqlm",),
    ),
    Signature(
        "VPTQ",
        f"transformers loads it where vptq is installed; {SOURCE}",
        "centroids.weight floats, indices integers",
    ),
    Signature(
        "SpQR",
        f"transformers loads it where spqr_quant is installed; {SOURCE}",
        "dense_weights integers, row_offsets integers, col_vals integers",
    ),
    Signature("HIGGS", TRANSFORMERS.format("flute-kernel"), "tables floats, weight i16 (A B), scales floats"),
    Signature(
        "FP-Quant",
        TRANSFORMERS.format("fp_quant"),
        "qweight u8 (N K/2), scales exponents|e4m3, forward_hadamard_matrix|weight_global_scale",
    ),
    Signature(
        "FP-Quant",
        TRANSFORMERS.format("fp_quant"),
        "qweight u8 (N K/2), scales exponents|e4m3, forward_hadamard_matrix, weight_global_scale",
    ),
    Signature(
        "SVDQuant (Nunchaku)",
        f"Nunchaku, or diffusers with it, loads it; {SOURCE}",
        "wscales, qweight i8 (A B)",
    ),
    Signature("QQQ", f"the QQQ repository and GPTQModel load it; {SOURCE}", "s_channel floats, B i32"),
    Signature(
        "BitBLAS",
        f"GPTQModel loads it where bitblas is installed; {SOURCE}",
        "qweight i8 (A B), scales floats",
    ),
    Signature(
        "Gemma's mobile format",
        TRANSFORMERS.format("torch"),
        "input_activation_scale f32, weight u8|i8 (N B), weight_scale f32 (N 1)",
    ),
    Signature(
        "Gemma's mobile format",
        TRANSFORMERS.format("torch"),
        "embedding_quantized u8|i8, embedding_scale f32",
    ),
    Signature(
        "Metal",
        "state the quantization_config of its writer, quant_method metal with bits and group_size",
        "qbiases floats (N G), weight u32 (N B), scales floats (N G)",
        unless=("mlx", "mlx_float"),
    ),
    Signature(
        "MLX",
        "state the `quantization` of its config.json, with bits, group_size and mode; mlx-lm loads it",
        "scales, weight u32",
        without=("qbiases",),
        unless=("mlx", "mlx_float"),
    ),
    Signature(
        "BitNet",
        "state the quantization_config of its writer, quant_method bitnet with linear_class, which decides "
        "whether the scale multiplies",
        "weight_scale floats (1), weight u8 (N/4 K)",
        without=("weight_scale_2", "weight.absmax"),
        unless=("fp8", "ct_int", "bitnet"),
    ),
    Signature(
        "ModelOpt's NVFP4_SVD",
        MODELOPT.format("NVFP4_SVD"),
        "weight_quantizer._svdquant_lora_a floats (R K), weight u8 (N K/2)",
        unless=("modelopt_nvfp4_extended",),
    ),
    Signature(
        "ModelOpt's NVFP4 with groups of 32",
        MODELOPT.format("W4A8_NVFP4_FP8"),
        "weight_scale_2 f32, weight u8 (N K/2), weight_scale e4m3 (N K/32)",
        unless=("modelopt_nvfp4", "modelopt_nvfp4_extended"),
    ),
    Signature(
        "ModelOpt's W4A8_AWQ",
        MODELOPT.format("W4A8_AWQ"),
        "weight_scale_2 f32, weight u8 (N/2 K), weight_scale floats (N G)",
        unless=("modelopt_awq",),
    ),
    Signature(
        "ModelOpt's W8A8_SQ_PER_CHANNEL",
        MODELOPT.format("W8A8_SQ_PER_CHANNEL"),
        "pre_quant_scale floats (K), weight i8 (N K), weight_scale floats (N)",
        unless=("modelopt_int8",),
    ),
    Signature(
        "NVFP4 with swizzled scales",
        "TensorRT-LLM and ComfyUI read it; export it with ModelOpt or llm-compressor",
        "weight_scale_2 f32, weight u8 (N K/2), weight_scale e4m3 (N@128^ K/16^@4^)",
        without=LOW_RANK,
    ),
    Signature(
        "MXFP8 with swizzled scales",
        "TensorRT-LLM and ComfyUI read it; export it with ModelOpt or llm-compressor",
        "weight_scale exponents (N@128^ K/32^@4^), weight e4m3 (N K)",
    ),
    Signature(
        "NVFP4 whose scales are bytes",
        "store the scales as float8_e4m3fn, which has the same bytes",
        "weight_scale_2 f32, weight u8 (N K/2), weight_scale u8 (N K/16)",
    ),
    Signature(
        "Quark's MXFP6",
        QUARK,
        "weight_scale exponents (N K/32), weight u8 (N K*3/4)",
        unless=("quark_mxfp6",),
    ),
    Signature(
        "Quark's int4",
        QUARK,
        "weight_scale floats (G N), weight i32 (K N/8)",
        unless=("quark_int4",),
    ),
    Signature(
        "Quark's int8",
        QUARK,
        "weight_zero_point i8 (N), weight i8 (N K), weight_scale floats (N)",
        unless=("ct_int",),
    ),
)
# Applies only to checkpoints of another method; such layers are an error without a config, or with their own.
WORDS = Signature(
    "words of GPTQ or AWQ, whose bits and zero points the config does not state",
    "state the layer's own settings in the config, as AutoRound's extra_config or GPTQModel's dynamic do",
    "qweight i32 (A B), qzeros i32 (G C), scales floats (G N)",
)
# Unsupported methods of configs -> a program that reads them.
METHODS_ELSEWHERE: Mapping[str, str] = {
    "bitblas": f"GPTQModel loads it where bitblas is installed; {SOURCE}",
    "fouroversix": f"transformers loads it where fouroversix is installed; {SOURCE}",
    "fp_quant": TRANSFORMERS.format("fp_quant"),
    "gemma": f"transformers loads it; {SOURCE}",
    "higgs": TRANSFORMERS.format("flute-kernel"),
    "moe_wna16": "state the method that wrote the tensors, gptq or awq: moe_wna16 is a kernel of vLLM",
    "nvfp4": f"transformers quantizes by it while loading; {SOURCE}",
    "qqq": f"GPTQModel and the QQQ repository load it; {SOURCE}",
    "quip": f"the QuIP# repository loads it; {SOURCE}",
    "qtip": f"the QTIP repository loads it; {SOURCE}",
    "sinq": f"transformers loads it where sinq is installed; {SOURCE}",
    "spqr": f"transformers loads it where spqr_quant is installed; {SOURCE}",
    "svdquant": f"Nunchaku, or diffusers with it, loads it; {SOURCE}",
    "vptq": f"transformers loads it where vptq is installed; {SOURCE}",
    "w4afp8": f"SGLang loads it; {SOURCE}",
}
# Suffixes of these dialects that no supported format has.
FOREIGN_SUFFIXES = frozenset(
    suffix
    for row in SIGNATURES
    for part in row.parts
    for suffix in part.suffixes
    if ("." in suffix or suffix not in ROLES) and not suffix.startswith("_")
) - {"scale", "zero", "codes", "blocks", "tables", "indices"}
