"""Random damage to fixtures of every format: no raw error, and no `ok` for an unusable checkpoint."""

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.checkpoint import open_checkpoint
from qload.errors import QloadError
from qload.verify import inspect, verify
from tests.paths import FOLDERS, cases
from tests.verify.damage import Case, read_tensors, write_case

BROKEN_ELSEWHERE = ("gptq", "awq")  # in test_rules
SOURCES = [
    folder
    for folder in cases(*(name for name in FOLDERS if name not in BROKEN_ELSEWHERE))
    if (folder / "model.safetensors").is_file()
]
SUFFIXES = ("weight", "qweight", "weight_scale", "weight_scale_inv", "B", "bias", "SCB", "weight_shape", "x")
DTYPES = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
VALUES = (None, -1, 0, 1 << 40, 10**30, 1.5, "", "x", [], {}, [1], True, ["re:(a+)+$"], "re:(", float("nan"))

CHANGES: tuple[Callable[[Tensor, random.Random], Tensor], ...] = (
    lambda tensor, chance: tensor.to(chance.choice(DTYPES)),
    lambda tensor, chance: tensor.contiguous().view(chance.choice(DTYPES)),
    lambda tensor, chance: tensor[..., :-1],
    lambda tensor, chance: tensor[: tensor.shape[0] // 2],
    lambda tensor, chance: tensor[:0],
    lambda tensor, chance: torch.cat([tensor, tensor[:1]]),
    lambda tensor, chance: tensor.transpose(0, -1),
    lambda tensor, chance: tensor.reshape(-1),
    lambda tensor, chance: tensor[None],
    lambda tensor, chance: tensor.reshape(-1)[0],
    lambda tensor, chance: torch.zeros_like(tensor),
    lambda tensor, chance: tensor * -1,
    lambda tensor, chance: tensor * float("nan"),
    lambda tensor, chance: _other_bytes(tensor, chance),
)


def _other_bytes(tensor: Tensor, chance: random.Random) -> Tensor:
    stored = tensor.contiguous().view(-1).view(torch.uint8).clone()
    for _ in range(4):
        stored[chance.randrange(stored.numel())] = chance.randrange(256)
    return stored.view(tensor.dtype).view(tensor.shape)


def _hurt_tensor(case: Case, chance: random.Random) -> None:
    name = chance.choice(sorted(case.tensors))
    kind = chance.randrange(4)
    if kind < 2:
        tensor = case.tensors[name].clone()
        case.tensors[f"{name.rpartition('.')[0]}.{chance.choice(SUFFIXES)}"] = tensor
    if kind in (0, 2):
        del case.tensors[name]
    if kind == 3:
        try:
            case.tensors[name] = chance.choice(CHANGES)(case.tensors[name], chance)
        except (RuntimeError, IndexError, NotImplementedError):  # not applicable to this tensor
            case.tensors[name] = case.tensors[name][None]


def _places(config: Any) -> Iterator[tuple[Any, Any]]:
    for key in config if isinstance(config, dict) else range(len(config)):
        yield config, key
        if isinstance(config[key], dict | list):
            yield from _places(config[key])


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_broken_nothing_raw_is_raised_and_ok_means_usable(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    for _ in range(20):
        folder = chance.choice(SOURCES)
        case = read_tensors(folder)
        if chance.random() < 0.35:
            config, key = chance.choice(list(_places(case.config)))
            config[key] = copy.deepcopy(chance.choice(VALUES))
        else:
            _hurt_tensor(case, chance)
        broken = write_case(case, tmp_path / "broken")

        reports = [inspect(broken), verify(broken, tp=2), verify(broken, against=folder)]

        finite = loads_finite(broken, [layer.prefix for layer in reports[0].layers])
        assert finite or reports[1].verdict != "ok", folder


def loads_finite(folder: Path, prefixes: list[str]) -> bool:
    """Return whether every layer loads with finite values; an error of qload is permitted."""
    try:
        with open_checkpoint(folder) as weights:
            return all(bool(weights.get_weights(name).dequantize().isfinite().all()) for name in prefixes)
    except QloadError:
        return False
