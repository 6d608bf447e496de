"""Tensor types of GGUF files: numbers, names, and the size of a block.

A row of K inputs is stored as K / elements blocks of a fixed number of bytes. Source: ggml, as vendored by
llama-cpp-python 0.3.36, and gguf 0.19.0; the numbers of other programs: ik_llama.cpp and microsoft/BitNet.
"""

from dataclasses import dataclass
from typing import NamedTuple

from qload.errors import StorageError


class GGMLType(NamedTuple):
    """A tensor type: name, elements and bytes of a block, and the dtype of elements outside of blocks."""

    name: str
    elements: int
    nbytes: int
    dtype: str = ""

    @property
    def suffix(self) -> str:
        """Last part of the names of a layer's blocks: `q4_k`."""
        return self.name.lower()


GGML_TYPES = {
    0: GGMLType("F32", 1, 4, "F32"),
    1: GGMLType("F16", 1, 2, "F16"),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1, "I8"),
    25: GGMLType("I16", 1, 2, "I16"),
    26: GGMLType("I32", 1, 4, "I32"),
    27: GGMLType("I64", 1, 8, "I64"),
    28: GGMLType("F64", 1, 8, "F64"),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2, "BF16"),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
    40: GGMLType("NVFP4", 64, 36),
    41: GGMLType("Q1_0", 128, 18),
    42: GGMLType("Q2_0", 64, 18),
}
BLOCK_TYPES = {kind.name: kind for kind in GGML_TYPES.values() if not kind.dtype}


@dataclass(frozen=True)
class UnreadType:
    """A type that qload does not read: its name, and the reason with a remedy."""

    name: str
    reason: str
    remedy: str


REMOVED = "no longer part of ggml"
IN_MEMORY = "a type that ggml has in memory alone"
CONVERT_AGAIN = "convert the model again with a current llama.cpp"
IK_REMEDY = "ik_llama.cpp runs it; llama.cpp and qload read a quantization of the original model by llama.cpp"
# ik_llama.cpp's types; those ending in _R4, _R8 and _R16 interleave rows.
IK_TYPES = {
    97: "Q8_0_X4", 98: "Q8_1_X4", 99: "Q8_2_X4", 133: "Q6_0", 134: "IQ1_BN", 135: "IQ2_BN", 136: "Q8_K64",
    137: "IQ2_K", 138: "IQ3_K", 139: "IQ4_K", 140: "IQ5_K", 141: "IQ6_K", 144: "IQ4_KS", 145: "IQ2_KS",
    146: "IQ4_KSS", 147: "Q8_K16", 148: "Q8_K32", 149: "Q8_KR8", 150: "Q8_K128", 151: "Q8_KV", 152: "IQ5_KS",
    153: "IQ2_KT", 154: "IQ3_KT", 155: "IQ4_KT", 156: "IQ3_KS", 157: "IQ2_KL", 158: "IQ1_KT",
    202: "Q4_0_R8", 206: "Q5_0_R4", 208: "Q8_0_R8", 210: "Q2_K_R4", 211: "Q3_K_R4", 212: "Q4_K_R4",
    213: "Q5_K_R4", 214: "Q6_K_R4", 216: "IQ2_XXS_R4", 217: "IQ2_XS_R4", 218: "IQ3_XXS_R4", 219: "IQ1_S_R4",
    220: "IQ4_NL_R4", 221: "IQ3_S_R4", 222: "IQ2_S_R4", 223: "IQ4_XS_R8", 229: "IQ1_M_R4", 230: "BF16_R16",
    233: "Q6_0_R4", 335: "IQ2_BN_R4", 337: "IQ2_K_R4", 338: "IQ3_K_R4", 339: "IQ4_K_R4", 340: "IQ5_K_R4",
    344: "IQ4_KS_R4", 352: "IQ5_KS_R4", 398: "Q8_KV_R8", 399: "Q8_K_R8",
}  # fmt: skip
UNREAD_TYPES = {
    4: UnreadType("Q4_2", REMOVED, CONVERT_AGAIN),
    5: UnreadType("Q4_3", REMOVED, CONVERT_AGAIN),
    9: UnreadType("Q8_1", IN_MEMORY, CONVERT_AGAIN),
    15: UnreadType("Q8_K", IN_MEMORY, CONVERT_AGAIN),
    31: UnreadType("Q4_0_4_4", REMOVED, CONVERT_AGAIN),
    32: UnreadType("Q4_0_4_8", REMOVED, CONVERT_AGAIN),
    33: UnreadType("Q4_0_8_8", REMOVED, CONVERT_AGAIN),
    36: UnreadType("IQ4_NL_4_4 or I2_S", "removed from ggml, or of microsoft/BitNet", "bitnet.cpp runs I2_S"),
    37: UnreadType("IQ4_NL_4_8", REMOVED, CONVERT_AGAIN),
    38: UnreadType("IQ4_NL_8_8", REMOVED, CONVERT_AGAIN),
    **{number: UnreadType(name, "a type of ik_llama.cpp", IK_REMEDY) for number, name in IK_TYPES.items()},
}


def ggml_type(number: int, file: str, tensor: str) -> GGMLType:
    """Return the type of a number; StorageError, rule `unsupported-format`, for a type that is not read."""
    kind = GGML_TYPES.get(number)
    if kind is not None:
        return kind
    unread = UNREAD_TYPES.get(number)
    if unread is not None:
        words, remedy = f"has type {number}, {unread.name}: {unread.reason}", unread.remedy
    else:
        words, remedy = (
            f"has type {number}, unknown to this qload",
            "the writer of the file reads it",
        )
    raise StorageError(file, "unsupported-format", words, tensor, remedy=remedy)
