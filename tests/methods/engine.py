"""What an engine does: a checkpoint's tensors by name, each through the loader of its parameter."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from qload.formats import AWQConfig, AWQWeight
from qload.layouts import awq as order
from qload.methods import AWQMarlinConfig
from qload.parallel import FakeWorld, Rank


def awq(K: int, N: int, group: int, bits: int = 4, *, seed: int = 0) -> AWQWeight:
    """Codes and zero points of every value, scales that are powers of two."""
    generator = torch.Generator().manual_seed(seed)
    groups = 1 if group == -1 else K // group
    codes, zeros = (
        torch.randint(2**bits, (rows, N), generator=generator, dtype=torch.int32) for rows in (K, groups)
    )
    powers = torch.randint(-2, 2, (groups, N), generator=generator)
    return AWQWeight(
        config=AWQConfig(group, bits),
        qweight=order.columns(bits).pack(codes),
        qzeros=order.columns(bits).pack(zeros),
        scales=(2.0**powers).half(),
    )


def joined(parts: Iterable[AWQWeight]) -> AWQWeight:
    """Layers of the same inputs as one, their outputs one after another."""
    listed = list(parts)
    fields = {
        name: torch.cat([part.fields()[name] for part in listed], 1)
        for name in ("qweight", "qzeros", "scales")
    }
    return AWQWeight(config=listed[0].config, **fields)


def config_of(weight: AWQWeight, **changes: Any) -> AWQMarlinConfig:
    """The engine's config of such a layer."""
    return AWQMarlinConfig(
        **{
            "weight_bits": weight.config.bits,
            "group_size": weight.config.group_size,
            "zero_point": True,
            **changes,
        }
    )


def load(module: nn.Module, tensors: dict[str, Tensor], *shard: int | str) -> None:
    """Hand each tensor to the parameter of its name."""
    for name, tensor in tensors.items():
        param = getattr(module, name)
        param.weight_loader(param, tensor, *shard)


def ready(module: nn.Module) -> nn.Module:
    """As an engine does after loading."""
    module.quant_method.process_weights_after_loading(module)
    return module


def ranks(world: int, make: Callable[[Rank], nn.Module]) -> list[nn.Module]:
    """One module for each rank of a world."""
    return [make(rank) for rank in FakeWorld(world)]
