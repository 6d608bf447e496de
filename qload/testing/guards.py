"""Guard zones: a tensor amid poison, which shows who reads or writes beyond it, or writes into its inputs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qload.spec import Weight

ZONE = 512  # bytes on either side, a multiple of every alignment that kernels ask for
POISON = 0xFF  # every float type reads NaN of it, every integer type -1 or its largest number


@dataclass(frozen=True)
class Guards:
    """Copies of tensors in the middle of poison, and what is wrong with them after they were used.

    Whoever reads beyond a guarded tensor of floats gets NaN, which no check passes; `assert_whole` fails for
    who writes beyond it, or into it.
    """

    _held: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)

    def around(self, name: str, value: Any) -> Any:
        """A `value`, or all tensors within a tuple, list, mapping or typed weight, guarded under this `name`.

        What is none of these, and tensors that are not contiguous, stay as they are.
        """
        if isinstance(value, Tensor):
            return self._guarded(name, value) if value.is_contiguous() else value
        if isinstance(value, Weight):
            return value.holding({f: self.around(f"{name}.{f}", t) for f, t in value.fields().items()})
        if isinstance(value, Mapping):
            return {key: self.around(f"{name}[{key!r}]", held) for key, held in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.around(f"{name}[{at}]", held) for at, held in enumerate(value)))
        if isinstance(value, list | tuple):
            return type(value)(self.around(f"{name}[{at}]", held) for at, held in enumerate(value))
        return value

    def _guarded(self, name: str, tensor: Tensor) -> Tensor:
        size = tensor.numel() * tensor.element_size()
        memory = torch.full((size + 2 * ZONE,), POISON, dtype=torch.uint8, device=tensor.device)
        own = memory[ZONE : ZONE + size].view(tensor.dtype).view(tensor.shape)
        own.copy_(tensor)
        self._held.append((name, memory, memory.clone()))
        return own

    def assert_whole(self) -> None:
        """Nothing was written into guarded tensors, or before or behind them."""
        __tracebackhide__ = True
        for name, memory, before in self._held:
            wrong = (memory != before).nonzero().flatten()
            if wrong.numel():
                first, size = int(wrong[0]) - ZONE, memory.numel() - 2 * ZONE
                where = "before" if first < 0 else "behind" if first >= size else "into"
                at = first - size if first >= size else first
                raise AssertionError(
                    f"the kernel wrote {where} {name}: {wrong.numel()} bytes differ, the first at byte {at}"
                )


def around_borders(*borders: int, most: int = 257) -> tuple[int, ...]:
    """Numbers of tokens where dispatch takes another way: `borders` with their neighbours, up to `most`.

    Without `borders`: 1, and around 8, 16, 24, 32, 64, 128 and 256, where the kernels that we know change.
    """
    known = borders or (1, 8, 16, 24, 32, 64, 128, 256)
    return tuple(sorted({m for border in known for m in (border - 1, border, border + 1) if 1 <= m <= most}))
