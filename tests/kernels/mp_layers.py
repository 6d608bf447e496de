"""Layers as an engine holds them before a kernel prepares them: tagged parameters, either way round."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qload.formats import GPTQConfig, GPTQWeight
from qload.kernels import MPLinearLayerConfig, scalar_types
from qload.layouts import Stored, ZeroPoints, awq, gptq
from qload.loader import ConfiguredFormat, FormatLoader
from qload.parallel import Rank
from qload.storage import MemoryStorage
from qload.weights import Weights

BIASED = {2: "uint2b2", 3: "uint3b4", 4: "uint4b8", 8: "uint8b128"}


@dataclass(frozen=True)
class Case:
    """A layer of (N, K) with these settings; `turned`: outputs first, as compressed-tensors stores them."""

    bits: int = 4
    group: int = 32
    zeros: ZeroPoints | None = None  # None: symmetric, no zero points
    act_order: bool = False
    turned: bool = False
    order: str = "gptq"
    N: int = 64
    K: int = 256
    seed: int = 0

    @property
    def config(self) -> MPLinearLayerConfig:
        kind = f"uint{self.bits}" if self.zeros else BIASED[self.bits]
        shape = (self.K, self.N)
        return MPLinearLayerConfig(
            shape, shape, getattr(scalar_types, kind), torch.float16, self.group, self.zeros is not None,
            self.act_order, zeros=self.zeros, order=self.order,  # type: ignore[arg-type]
        )  # fmt: skip

    def weight(self, *, scale: float | None = None) -> GPTQWeight:
        """Codes of every value; scales drawn, or powers of two up to `scale`."""
        generator = torch.Generator().manual_seed(self.seed)
        convention = self.zeros or Stored()
        known = GPTQConfig(self.bits, self.group, convention)
        groups, packing = known.groups(self.K), gptq.columns(self.bits)
        rows = known.in_order(self.K)
        if self.act_order:
            rows = rows[torch.randperm(self.K, generator=generator)]
        low, high = convention.span(self.bits)
        points = torch.full((groups, self.N), 2 ** (self.bits - 1))
        if self.zeros is not None:
            points = torch.randint(low, min(high, 2**self.bits - 1) + 1, points.shape, generator=generator)
        scales = torch.rand(groups, self.N, generator=generator) + 0.01
        if scale is not None:
            scales = scale * 2.0 ** -torch.randint(0, 3, (groups, self.N), generator=generator)
        codes = torch.randint(0, 2**self.bits, (self.K, self.N), generator=generator)
        return GPTQWeight(
            config=known,
            qweight=gptq.rows(self.bits).pack(codes),
            qzeros=convention.write(points, packing),
            scales=scales.half(),
            g_idx=rows.to(torch.int32),
        )

    def layer(self, weight: GPTQWeight) -> nn.Module:
        """The parameters `qweight`, `scales`, `qzeros`, `g_idx` of a layer that holds this weight."""
        layer = nn.Module()
        words, points = weight.qweight, weight.qzeros
        if self.order == "awq":
            words = awq.columns(self.bits).pack(gptq.rows(self.bits).unpack(words))
            convention = self.zeros or Stored()
            plain = convention.read(points, gptq.columns(self.bits))
            points = convention.write(plain, awq.columns(self.bits))
        along_k = self.order == "gptq"
        self._put(layer, "qweight", words, 0 if along_k else 1)
        self._put(layer, "scales", weight.scales, None)
        if self.zeros is not None:
            self._put(layer, "qzeros", points, 1)
        if self.act_order:
            layer.register_parameter("g_idx", nn.Parameter(weight.g_idx, requires_grad=False))
        return layer

    def _put(self, layer: nn.Module, name: str, tensor: Tensor, packed: int | None) -> None:
        made = tensor.t().contiguous() if self.turned else tensor.clone()
        parameter = nn.Parameter(made, requires_grad=False)
        tags = {"input_dim": int(self.turned), "output_dim": 1 - int(self.turned)}
        if packed is not None:
            tags["packed_dim"] = 1 - packed if self.turned else packed
        for tag, value in tags.items():
            setattr(parameter, tag, value)
        layer.register_parameter(name, parameter)


def row_share(case: Case, weight: GPTQWeight, place: int, world: int) -> GPTQWeight:
    """One rank's rows of a weight, as a loader cuts it."""
    tensors = {f"a.{name}": tensor for name, tensor in weight.fields().items()}
    loader = FormatLoader(ConfiguredFormat(GPTQWeight, weight.config))
    share = Weights(MemoryStorage(tensors), loader=loader, process_group=Rank(place, world))
    return share.get_weights_row("a")  # type: ignore[return-value]
