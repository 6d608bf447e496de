"""The forms of stacks that are read: which tensors of each expert one stored tensor holds, and where.

E experts of N outputs and K inputs, gate and up stored as one matrix of both their outputs:

    gate_up_proj, down_proj          (E, N, K), or (E, K, N)      plain, FP8; NVFP4 packs two inputs a byte
    *_bias                           (E, N)
    *_weight_scale, *_scale          (), (E,), (E, N), (E, N, 1), (E, 1, N); NVFP4 (E, N, K/16), (E, K/16, N)
    *_scale_inv                      the same, or one a block: (E, N/b, K/b), (E, K/b, N/b)
    *_weight_scale_2, *_input_scale  (), (E,)
    *_blocks, *_scales               (E, N, K/32, 16), (E, N, K/32)  MXFP4

Source: the files of transformers 5.23.0 (gpt_oss, llama4, FP8), modelopt 0.47.0 and gpt-oss.
"""

from dataclasses import dataclass
from math import prod

from qload.architecture.table import Stacked
from qload.experts.stacks_slots import Slot
from qload.storage import TensorInfo

# The matrices that are stacked -> the expert's layers that each of them holds.
MATRICES = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "gate_proj": ("gate_proj",),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}
# What a stored name goes on with -> what the expert's own tensor is called.
FIELDS = {
    "": "weight",
    "_blocks": "weight_packed",
    "_scales": "weight_scale",
    "_scale": "weight_scale",
    "_weight_scale": "weight_scale",
    "_scale_inv": "weight_scale_inv",
    "_weight_scale_inv": "weight_scale_inv",
    "_weight_scale_2": "weight_scale_2",
    "_input_scale": "input_scale",
    "_bias": "bias",
}
SCALES_OF_FP8 = ("_scale_inv", "_weight_scale_inv")
LONE = ("weight_scale_2", "input_scale")  # there is one, or one an expert
BLOCK = 16  # bytes, of 32 inputs in MXFP4

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """One stacked matrix: N outputs of all its parts together, K inputs, how it lies, and its FP8 blocks.

    `parts`: the layers of an expert that it holds. `block`: (outputs, inputs) that share a scale, or None.
    `fp8`: whether it is FP8; beside a plain one transformers stores scales of blocks too, which mean nothing.
    """

    parts: tuple[str, ...]
    N: int
    K: int
    order: Stacked
    block: tuple[int, int] | None = None
    fp8: bool = True

    @property
    def interleaved(self) -> bool:
        """Whether neighbours among the outputs are of different parts."""
        return self.order.interleaved and len(self.parts) > 1

    def slots(self, suffix: str, source: str, info: TensorInfo) -> list[Slot] | None:
        """Where each part's tensor lies in the stored one; None for a form that is not known."""
        field, dims = FIELDS[suffix], info.shape[1:]
        if 0 in info.shape:
            return None
        if suffix == "_blocks":
            return self._blocks(source, info)
        if field == "weight":
            return self._matrix(source, info, self.order.inputs_first) if len(dims) == 2 else None
        if field == "bias":
            return self._split(source, info, dims) if len(dims) == 1 else None
        if info.shape in ((), (1,)):
            return self._shared(source, info, info.shape, counted=False)
        if prod(dims) == 1 or (field == "weight_scale_inv" and not self.fp8):
            return self._shared(source, info, dims)
        if field in LONE:
            return None
        if len(dims) == 1:
            return self._split(source, info, dims) if dims == (self.N,) else None
        return self._scales(source, info) if len(dims) == 2 else None

    def _blocks(self, source: str, info: TensorInfo) -> list[Slot] | None:
        if len(info.shape) != 4 or info.shape[-1] != BLOCK:
            return None
        outputs, blocks = info.shape[1:3]
        return self._split(source, info, (outputs, blocks * BLOCK), bytes_of_block=BLOCK)

    def _scales(self, source: str, info: TensorInfo) -> list[Slot] | None:
        """One an output, of all its inputs or of groups of them, or one a block.

        Scales lie as their weight does; those of blocks, and of outputs, are told by their shape where they
        lie the other way. What contradicts the weight is left to the loader to refuse.
        """
        own = self.order.inputs_first
        for inputs_first in (own, not own):
            n, k = info.shape[:0:-1] if inputs_first else info.shape[1:]
            if n == self.N and (inputs_first == own or k == 1):
                return self._matrix(source, info, inputs_first)
            if (n, k) == self._grid():
                return self._blocks_of_scales(source, info, inputs_first)
        return None if self.interleaved else self._matrix(source, info, own)

    def _grid(self) -> tuple[int, int] | None:
        if self.block is None:
            return None
        return -(-self.N // self.block[0]), -(-self.K // self.block[1])

    def _blocks_of_scales(self, source: str, info: TensorInfo, inputs_first: bool) -> list[Slot] | None:
        """Those of each part, if no block has outputs of two parts, or if there is one block of outputs.

        Of parts shorter than a block transformers joins the scales of each, though one block has outputs of
        both.
        """
        assert self.block is not None
        dims, count, each = (
            info.shape[:0:-1] if inputs_first else info.shape[1:],
            len(self.parts),
            self.block[0],
        )
        if count > 1 and dims[0] == 1 and not self.interleaved:
            return self._shared(source, info, dims, inputs_first=inputs_first)
        straddle = self.N // count % each and count * each < self.N
        return None if self.interleaved or straddle else self._matrix(source, info, inputs_first)

    def _matrix(self, source: str, info: TensorInfo, inputs_first: bool) -> list[Slot] | None:
        dims = info.shape[:0:-1] if inputs_first else info.shape[1:]
        return self._split(source, info, dims, inputs_first=inputs_first)

    def _split(
        self,
        source: str,
        info: TensorInfo,
        dims: Shape,
        *,
        inputs_first: bool = False,
        bytes_of_block: int = 0,
    ) -> list[Slot] | None:
        """Equal shares of the outputs, which come first in `dims`."""
        count = len(self.parts)
        if dims[0] % count:
            return None
        each = dims[0] // count
        own = TensorInfo(info.dtype, (each, *dims[1:]), info.file)
        step, apart = (count, 1) if self.interleaved else (1, each)
        return [
            Slot(source, own, True, at * apart, step, inputs_first, bytes_of_block) for at in range(count)
        ]

    def _shared(
        self, source: str, info: TensorInfo, dims: Shape, *, counted: bool = True, inputs_first: bool = False
    ) -> list[Slot]:
        """All of it for each part."""
        own = [TensorInfo(info.dtype, dims, info.file, shared=at > 0) for at in range(len(self.parts))]
        return [Slot(source, one, counted, inputs_first=inputs_first) for one in own]
