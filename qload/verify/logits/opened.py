"""A checkpoint's model whose layers are watched: as it was loaded, and in the order of kernels."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from qload.detect import read_model_config
from qload.errors import CastError, MismatchError, RepackError
from qload.experts.stacking import stacked
from qload.kernels.declared import Maximum
from qload.kernels.dtypes import DTYPES
from qload.models import Decoder, TextConfig, load_model
from qload.models.memory import check_memory, free_bytes, stored_bytes
from qload.repacking import RepackingLoader
from qload.spec import Weight
from qload.verify.logits.prompt import config_of
from qload.verify.logits.watched import WatchedExperts, WatchedLinear, Watching
from qload.weights import Weights, open_checkpoint


@dataclass(frozen=True)
class Watched:
    """A model, what its config says, what its layers share, and the type of its activations."""

    model: Decoder
    config: TextConfig
    watch: Watching
    dtype: torch.dtype


@dataclass(frozen=True)
class Maker:
    """Makes the watched layer of a weight.

    `loader`: what repacks for the device; None: there are no kernels, the meaning alone is asked for.
    """

    loader: RepackingLoader | None
    dtype: torch.dtype
    watch: Watching

    def linear(self, weight: Weight, bias: Tensor | None, maximum: Maximum) -> nn.Module:
        """The layer of a weight, its bias, and what finds a maximum over the ranks."""
        if self.loader is None:
            return WatchedLinear(weight, bias, None, maximum, False, self.watch)
        repacked = self._repacked(weight)
        dtype = self.dtype if self.dtype in DTYPES else None
        kernel = repacked.get_linear(bias, maximum=maximum, dtype=dtype)
        held: Any = kernel
        self.watch.kernels[weight.layer.name] = repacked.format
        converted = repacked is not weight and _scale_type(held.typed) != _scale_type(repacked)
        return WatchedLinear(weight, held.bias, kernel, maximum, converted, self.watch)

    def experts(self, experts: Any, maximum: Maximum = None) -> nn.Module:
        """The layer of an `ExpertsWeight`."""
        if self.loader is None:
            return WatchedExperts(experts, experts, None, self.watch)
        repacked = self._experts_repacked(experts)
        self.watch.kernels[experts.gate_up.layer.name] = repacked.gate_up.format
        return WatchedExperts(experts, repacked, repacked.get_linear(maximum=maximum), self.watch)

    def _repacked(self, weight: Weight) -> Weight:
        assert self.loader is not None
        try:
            return self.loader.repacked(weight)
        except (RepackError, CastError):  # what stays as it is stored is multiplied so
            return weight

    def _experts_repacked(self, experts: Any) -> Any:
        """All matrices in the order of the kernel, or none where one of them stays as it is."""
        made = {}
        for name in ("gate_up", "down"):
            stack = getattr(experts, name)
            try:
                made[name] = stacked(stack.layer.name, len(stack), map(self._repacked, stack))
            except MismatchError:
                return experts
        return replace(experts, **made)


def _scale_type(weight: Weight) -> torch.dtype | None:
    scales = weight.fields().get("scales")
    return None if scales is None else scales.dtype


def watched(path: Any, device: str, dtype: torch.dtype | None = None, *, kernels: bool = True) -> Watched:
    """The model of a checkpoint, with kernels for the `device` or without; the errors of `load_model`.

    NotEnoughMemoryError where the weights, those that are repacked twice, are more than the device can hold.
    `dtype`: of activations; None: as the config says.
    """
    config = read_model_config(path)
    known = config_of(config)
    own = dtype or known.dtype or torch.float32
    options: dict[str, Any] = {"device": device, "dtype": own, "nonfinite": "allow"}  # a rule's finding
    with open_checkpoint(path, **options, target="auto") as weights:
        loader, watch = weights.loader, Watching()
        assert isinstance(loader, RepackingLoader)
        _check_memory(weights, torch.device(device), own, kernels)
        maker = Maker(loader if kernels else None, own, watch)
        with weights.use_loader(loader.inner):
            model = load_model(weights, config, make=maker.linear, make_experts=maker.experts)
    return Watched(model, known, watch, own)


def _check_memory(weights: Weights, device: torch.device, dtype: torch.dtype, kernels: bool) -> None:
    """What is no plain float may lie in two orders."""
    storage = weights.storage
    found = [storage.info(name) for name in storage.keys()]  # noqa: SIM118, it is no dict
    again = sum(each.nbytes for each in found if each.dtype.itemsize == 1 or not each.dtype.is_floating_point)
    check_memory(device, stored_bytes(storage, dtype) + kernels * again, free_bytes(device))
