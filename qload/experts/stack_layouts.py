"""Layouts of stacked experts: the place of each expert's tensors, by field and shape.

E experts of N outputs and K inputs each; gate and up may be joined along the outputs:

    PREFIX, PREFIX_weight, PREFIX.weight  (E, N, K) or (E, K, N)   float8, int8; uint8 holds two inputs a byte
    weight_packed                         (E, N, K/8), (E, N, K/2) int32 codes; two inputs a byte
    qweight, scales, qzeros, g_idx        (E, ...)                 each expert's as GPTQ and AWQ store a layer
    _blocks, _scales (.blocks, .scales)   (E, N, K/32, 16), (E, N, K/32)  MXFP4 of gpt-oss
    weight_scale, _scale, _scale_inv,     (), (E,), (E, N), (E, N, 1), (E, 1, N); groups (E, N, G), (E, G, N);
    .scale of DeepSeek V4                 blocks (E, N/b, K/b), (E, K/b, N/b)
    weight_scale_2, input_scale, ...      (), (E,), (E, 2) of gate and up
    weight_zero_point                     as the scales; packed (E, N/8, G)
    weight_shape                          [E, N, K], [N, K] or (E, 2)
    bias                                  (E, N)

A `Slot` is the place of one tensor of each expert:

    stored, inputs first, interleaved        of expert e, gate: first 0, step 2, inputs first
    (E, K, 2 N)                              (N, K) = stored[e, :, 0::2].T

Source: the files of transformers 5.23.0, modelopt 0.47.0, compressed-tensors 0.20.0, vLLM 0.11.0 and gpt-oss.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from math import prod

from qload import dtypes
from qload.errors import MismatchError
from qload.layouts import Order
from qload.lazy_torch import Tensor, torch
from qload.storage import TensorInfo
from qload.storage.file_reads import GAP
from qload.storage.protocol import extents

TURNED = Order("e k n -> e n k")
WINDOW_BYTES = 8 << 20  # of whole rows, read at once for some of their columns

Bounds = tuple[tuple[int, int], ...]
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class StackOrder:
    """Order of a stored stack, as a model's class has it.

    Attributes
    ----------
    interleaved
        Whether outputs of gate and up alternate.
    inputs_first
        Whether the axes are (E, K, N); None: unknown.
    """

    interleaved: bool
    inputs_first: bool | None


StackOrders = Callable[[str], StackOrder | None]  # name of a stored stack -> its order; None: unknown


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one tensor of each expert.

    Attributes
    ----------
    source
        The name of the stored tensor.
    info
        Dtype and shape of one expert's tensor, and the file of the stored one.
    counted
        Whether the first stored axis is that of experts; if not, all experts share the tensor.
    first
        Index of its first output among the joined outputs; 0 or 1 if they are interleaved.
    step
        Distance of its outputs: 2 where gate and up are interleaved.
    inputs_first
        Whether the stored axes are (inputs, outputs).
    bytes_of_block
        Bytes along the inputs with an axis of their own, 16 for MXFP4; 0: none.
    layers_of_shape
        Number of layers with the N outputs of a stored shape [E, N, K] or [N, K]; 0: it is no shape.
    experts
        E expected in a stored shape.
    lacks_axis
        Whether the last axis, of length 1, is not stored.
    """

    source: str
    info: TensorInfo
    counted: bool = True
    first: int = 0
    step: int = 1
    inputs_first: bool = False
    bytes_of_block: int = 0
    layers_of_shape: int = 0
    experts: int = 0
    lacks_axis: bool = False

    def stored(self, expert: int, pairs: Bounds, count: int = 1) -> Slices:
        """Slices to read for the elements `pairs` of the tensors of `count` experts from `expert` on.

        Of interleaved layers the slices have both.
        """
        slices = [slice(*pair) for pair in pairs]
        if self.layers_of_shape:
            return (slice(expert, expert + 1),) if self.counted else ()
        if self.lacks_axis:
            slices.pop()
        if slices and self.step > 1:
            slices[0] = slice(self.step * pairs[0][0], self.step * pairs[0][1])
        elif slices:
            slices[0] = slice(self.first + pairs[0][0], self.first + pairs[0][1])
        if self.bytes_of_block:
            start, stop = pairs[1]
            slices[1] = slice(start // self.bytes_of_block, -(-stop // self.bytes_of_block))
        if self.inputs_first:
            slices.reverse()
        return (slice(expert, expert + count), *slices) if self.counted else tuple(slices)

    @property
    def is_plain(self) -> bool:
        """True if each expert's tensor is a slice of the stored one, in its order of axes."""
        is_moved = self.inputs_first or self.step > 1
        return self.counted and not (is_moved or self.bytes_of_block or self.layers_of_shape)

    def arranged(self, block: Tensor, pairs: Bounds) -> Tensor:
        """Copy a block, read for the elements `pairs`, into the layout of one expert's tensor."""
        if self.layers_of_shape:
            return self._shape(block)[slice(*pairs[0])].clone()
        rows = self.arranged_rows(block if self.counted else block[None], pairs)
        return rows[0].clone(memory_format=torch.contiguous_format)

    def arranged_rows(self, block: Tensor, pairs: Bounds) -> Tensor:
        """Bring a block, read for the elements `pairs` of several experts, into their layout (E, ...)."""
        if self.step > 1:
            turns = slice(self.first, None, self.step)
            block = block[:, :, turns] if self.inputs_first else block[:, turns]
        if self.inputs_first:
            return TURNED.apply(block.contiguous())
        if self.bytes_of_block:
            block = self._of_blocks(block, pairs[1])
        return block.reshape([block.shape[0], *extents(pairs)])

    def _of_blocks(self, stored: Tensor, inputs: tuple[int, int]) -> Tensor:
        start = inputs[0] % self.bytes_of_block
        return stored.flatten(2)[:, :, start : start + inputs[1] - inputs[0]]

    def _shape(self, stored: Tensor) -> Tensor:
        """[N, K] of one layer; MismatchError if the stored shape contradicts E or N."""
        values = stored.flatten().tolist()
        outputs, inputs = values[-2:]
        if values[:-2] not in ([], [self.experts]) or outputs % self.layers_of_shape:
            expected = f"[{self.experts}, N, K], N of {self.layers_of_shape} layers of one size"
            raise MismatchError(self.source, "not the shape of these experts", expected, str(values))
        return torch.tensor([outputs // self.layers_of_shape, inputs], dtype=stored.dtype)


def widened(stored: Slices, info: TensorInfo) -> Slices:
    """Widen a slice of few columns of long rows: otherwise each row would be a read of its own."""
    columns, size = stored[-1], info.stored_dtype.itemsize
    wanted, row = columns.stop - columns.start, info.shape[-1]
    width = WINDOW_BYTES // (prod(part.stop - part.start for part in stored[:-1]) * size)
    if wanted >= width or (row - wanted) * size <= GAP:
        return stored
    start, stop = columns.start // width * width, -(-columns.stop // width) * width
    return (*stored[:-1], slice(start, min(stop, row)))


# The name of a stacked matrix -> the layers of an expert that it holds.
LAYERS: dict[str, tuple[str, ...]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "gate_up": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
    "input_linear": ("gate_proj", "up_proj"),
    "output_linear": ("down_proj",),
    **{name: (name,) for name in ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")},
}
DOWN = ("down_proj", "w2", "output_linear")  # matrices with the hidden size as outputs
HALVES = ("w13", "input_linear")  # names with the gate in the first half, in every program
# Suffix of a stack's name -> the field of an expert's own layer.
FIELDS: dict[str, str] = {
    "": "weight",
    "_weight": "weight",
    "_blocks": "weight_packed",
    "_scales": "weight_scale",
    "_scale": "weight_scale",
    "_scale_inv": "weight_scale_inv",
    **{
        f"{mark}{name}": name
        for mark in "_."
        for name in (
            "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale",
            "weight_zero_point", "weight_g_idx", "weight_shape", "input_scale", "input_global_scale",
            "input_zero_point", "activation_scale", "qweight", "qzeros", "g_idx", "pre_quant_scale", "bias",
        )
    },
    ".blocks": "weight_packed",
    ".weight": "weight",
    ".scales": "scales",
    ".scale": "scale",
}  # fmt: skip
WEIGHTS = ("weight", "weight_packed", "qweight")  # a layer has one of these fields
SCALES = ("weight_scale", "weight_scale_inv", "scale")  # names of a weight's scale
SINGLE = ("weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale", "input_zero_point",
          "activation_scale")  # fmt: skip
OF_INPUTS = ("g_idx", "weight_g_idx", "pre_quant_scale")  # fields with one entry for each input
COLUMNS = ("qweight", "qzeros", "scales")  # fields of a layer with outputs as the last axis
BLOCKS = ("_blocks", ".blocks")  # suffixes of MXFP4 in blocks, of gpt-oss
BYTES_OF_BLOCK = 16  # of 32 inputs

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Layout of one stacked matrix: N outputs of all its `layers` together, and K inputs.

    `stored_layers`: number of joined layers; `layers` has one entry if their order is unknown.
    `quantized`: False for plain weights, which transformers stores with meaningless block scales.
    `four_bits`: a byte holds two inputs.
    `scales_have_inputs`: scales of outputs are (N, 1); stored as (N,) they get that axis.
    """

    layers: tuple[str, ...]
    stored_layers: int
    N: int
    K: int
    inputs_first: bool
    interleaved: bool
    experts: int
    block: tuple[int, int] | None
    quantized: bool
    scales_have_inputs: bool
    four_bits: bool

    def slots(self, field: str, ending: str, source: str, info: TensorInfo) -> list[Slot] | None:
        """Locate each layer's tensor in the stored one; None for an unknown form."""
        dims = info.shape[1:]
        if 0 in info.shape:
            return None
        if ending in BLOCKS:
            return self._blocks_of_bytes(source, info)
        if field in ("weight", "weight_packed"):
            return self._matrix(source, info, self.inputs_first) if len(dims) == 2 else None
        if field == "weight_shape":
            return self._shape(source, info)
        if field in OF_INPUTS:
            return self._shared(source, info, info.shape[-1:], counted=len(info.shape) == 2)
        if field in COLUMNS:
            is_single_layer = len(self.layers) == 1 and len(dims) == 2
            return self._shared(source, info, dims) if is_single_layer else None
        if field == "bias":
            return self._split(source, info, dims) if len(dims) == 1 else None
        return self._scale(field, source, info)

    def _scale(self, field: str, source: str, info: TensorInfo) -> list[Slot] | None:
        """Locate scales or zero points: one per tensor, expert, layer, output, group or block."""
        dims = info.shape[1:]
        if info.shape in ((), (1,)):
            return self._shared(source, info, info.shape, counted=False)
        if field == "weight_scale_inv" and not self.quantized:
            return self._shared(source, info, dims)
        if prod(dims) == 1:
            alone = field in SINGLE or (self.scales_have_inputs and self.block is None and self.N > 1)
            return self._shared(source, info, () if alone else dims)
        each_layer = prod(dims) == dims[0] == self.stored_layers != self.N
        if each_layer and (len(self.layers) > 1 or dims not in self._grids()):
            return self._one_each(source, info)
        if field in SINGLE:
            return None
        if len(dims) == 1:
            return self._outputs(source, info) if dims == (self.N,) else None
        if field == "weight_zero_point" and info.stored_dtype is dtypes.int32:
            return self._packed_zeros(source, info)
        if len(dims) == 4 and dims[1] == dims[3] == 1:
            return None if self.inputs_first or self.interleaved else self._matrix(source, info, False)
        return self._scales(source, info) if len(dims) == 2 else None

    def _outputs(self, source: str, info: TensorInfo) -> list[Slot] | None:
        """Locate one scale for each output; integers of compressed-tensors get an axis of inputs."""
        slots = self._split(source, info, info.shape[1:])
        if not self.scales_have_inputs or slots is None:
            return slots
        header = TensorInfo(info.stored_dtype, (*slots[0].info.shape, 1), info.file)
        return [replace(slot, info=header, lacks_axis=True) for slot in slots]

    def _one_each(self, source: str, info: TensorInfo) -> list[Slot] | None:
        """Locate one scale for each joined layer; None if the layers are not split or interleaved."""
        if len(self.layers) == 1 or self.interleaved:
            return None
        dims = (1, *info.shape[2:])
        header = TensorInfo(info.stored_dtype, dims, info.file)
        return [Slot(source, header, True, at) for at in range(len(self.layers))]

    def _packed_zeros(self, source: str, info: TensorInfo) -> list[Slot] | None:
        """Locate zero points packed along the outputs; None where a word belongs to two layers."""
        if len(info.shape) != 3:
            return None
        words, count = info.shape[1], len(self.layers)
        bits, rest = divmod(32 * words, self.N)
        aligned = not rest and not self.N % count and not self.N // count * bits % 32
        return self._matrix(source, info, False) if count == 1 or aligned else None

    def _shape(self, source: str, info: TensorInfo) -> list[Slot] | None:
        """Locate a stored shape: [E, N, K] or [N, K] of all experts, or a row for each expert."""
        if info.shape not in ((2,), (3,)) and not (len(info.shape) == 2 and info.shape[1] == 2):
            return None
        counted, parts = len(info.shape) == 2, len(self.layers)
        headers = [TensorInfo(info.stored_dtype, (2,), info.file, shared=at > 0) for at in range(parts)]
        return [
            Slot(source, header, counted, layers_of_shape=parts, experts=self.experts) for header in headers
        ]

    def _blocks_of_bytes(self, source: str, info: TensorInfo) -> list[Slot] | None:
        if len(info.shape) != 4 or info.shape[-1] != BYTES_OF_BLOCK:
            return None
        outputs, blocks = info.shape[1:3]
        dims = outputs, blocks * BYTES_OF_BLOCK
        return self._split(source, info, dims, bytes_of_block=BYTES_OF_BLOCK)

    def _scales(self, source: str, info: TensorInfo) -> list[Slot] | None:
        """Locate scales of outputs, of groups of inputs, or of blocks.

        Scales have the order of their weight's axes; shapes reveal the other order for blocks and for
        outputs. The loader refuses a scale that contradicts the weight.
        """
        inputs_first = self.inputs_first
        rows = {turned: info.shape[2 if turned else 1] for turned in (inputs_first, not inputs_first)}
        for turned in (inputs_first, not inputs_first):
            n, k = info.shape[:0:-1] if turned else info.shape[1:]
            if n == self.N and (
                turned == inputs_first or k == 1 or (self.four_bits and rows[inputs_first] != self.N)
            ):
                return self._matrix(source, info, turned)
            if (n, k) in self._grids():
                return self._blocks_of_scales(source, info, turned)
        return None if self.interleaved else self._matrix(source, info, inputs_first)

    def _grids(self) -> Collection[Shape]:
        """Shapes (outputs, inputs) of block scales: blocks over all outputs, and blocks of each layer."""
        if self.block is None:
            return ()
        rows, columns = self.block
        joined = self.stored_layers * -(-(self.N // self.stored_layers) // rows)
        return {(n, -(-self.K // columns)) for n in (-(-self.N // rows), joined)}

    def _blocks_of_scales(self, source: str, info: TensorInfo, turned: bool) -> list[Slot] | None:
        """Locate the block scales of each layer; None where layers share a block but not all outputs.

        For layers shorter than a block transformers joins the scales of each layer, although one block would
        cover both. Blocks of layers that stay joined start at the first output.
        """
        assert self.block is not None
        dims = info.shape[:0:-1] if turned else info.shape[1:]
        count, rows = self.stored_layers, self.block[0]
        if len(self.layers) == 1:
            joined = count * -(-(self.N // count) // rows)
            two_readings = count > 1 and self.N // count % rows and joined == -(-self.N // rows) > 1
            return (
                None if two_readings or dims[0] != -(-self.N // rows) else self._matrix(source, info, turned)
            )
        if dims[0] == 1 and not self.interleaved:
            return self._shared(source, info, dims, inputs_first=turned)
        straddle = self.N // count % rows and count * rows < self.N
        joined_apart = dims[0] == count * -(-(self.N // count) // rows) != -(-self.N // rows)
        if self.interleaved or (straddle and not joined_apart):
            return None
        return self._matrix(source, info, turned)

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
        """Split the outputs, the first of `dims`, evenly among the layers."""
        count = len(self.layers)
        if dims[0] % count:
            return None
        outputs = dims[0] // count
        header = TensorInfo(info.stored_dtype, (outputs, *dims[1:]), info.file)
        step, apart = (count, 1) if self.interleaved else (1, outputs)
        return [
            Slot(source, header, True, at * apart, step, inputs_first, bytes_of_block) for at in range(count)
        ]

    def _shared(
        self, source: str, info: TensorInfo, dims: Shape, *, counted: bool = True, inputs_first: bool = False
    ) -> list[Slot]:
        """Give each layer the whole tensor."""
        headers = [
            TensorInfo(info.stored_dtype, dims, info.file, shared=at > 0) for at in range(len(self.layers))
        ]
        return [Slot(source, header, counted, inputs_first=inputs_first) for header in headers]
