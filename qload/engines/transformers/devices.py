"""On which device each slot multiplies, as transformers' device map says, and where its tensors wait."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qload.errors import ArgumentError

CPU = torch.device("cpu")


@dataclass(frozen=True)
class SlotPlace:
    """Where a layer multiplies; `away`: its tensors wait on the CPU, and come for each product."""

    device: torch.device
    away: bool = False


def check_map(device_map: Mapping[str, Any], names: Iterable[str]) -> None:
    """ArgumentError where a map puts one of the layers `names` on a disk, or on the device without bytes."""
    for name in names:
        said = str(entry(device_map, name))
        if said in ("disk", "meta"):
            expected = "a device or 'cpu' for each quantized layer: tensors do not wait on a disk"
            raise ArgumentError("device_map", expected, f"{said!r} for {name}")


def entry(device_map: Mapping[str, Any], name: str) -> Any:
    """What the map says of the module `name`: of the longest run of its segments that it has; or None."""
    segments = name.split(".")
    for count in range(len(segments), -1, -1):
        found = device_map.get(".".join(segments[:count]))
        if found is not None:
            return found
    return None


def places_in(model: Any, device_map: Mapping[str, Any] | None, names: Iterable[str]) -> dict[str, SlotPlace]:
    """Where each of the modules `names` multiplies, once the model is dispatched.

    A model that goes to one device has no hooks; of one that goes to several the hooks say where it runs.
    """
    dispatched: Mapping[str, Any] = getattr(model, "hf_device_map", {})
    if not dispatched:
        return {name: SlotPlace(_device(entry(device_map or {}, name))) for name in names}
    found = {}
    for name in names:
        runs = _device(_hooked(model, name))
        found[name] = SlotPlace(runs, away=entry(dispatched, name) == "cpu" and str(runs) != "cpu")
    return found


def keep_away(linear: nn.Module, place: SlotPlace) -> None:
    """Let the tensors of a layer wait on the CPU, where its place says so, and come for each product."""
    if not place.away:
        return
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    linear.to("cpu")
    add_hook_to_module(linear, AlignDevicesHook(place.device, offload=True, offload_buffers=True))


def _hooked(model: nn.Module, name: str) -> Any:
    """Where the hook of a module, or of the nearest that it is in, makes it run."""
    segments = name.split(".")
    for count in range(len(segments), -1, -1):
        hook = getattr(model.get_submodule(".".join(segments[:count])), "_hf_hook", None)
        hooks = getattr(hook, "hooks", (hook,))
        device = next(filter(None, (getattr(each, "execution_device", None) for each in hooks)), None)
        if isinstance(device, Mapping):
            device = entry(device, name)
        if device is not None:
            return device
    return None


def _device(said: Any) -> torch.device:
    if said is None:
        return CPU
    if isinstance(said, int):
        kind = torch.accelerator.current_accelerator()
        return torch.device("cuda" if kind is None else kind.type, said)
    return torch.device(said)
