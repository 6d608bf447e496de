"""Guard zones around tensors: poison that shows reads and writes out of bounds, and writes to inputs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qload.spec import Weight

ZONE_BYTES = 512  # on either side, a multiple of the alignments of kernels
POISON = 0xFF  # NaN in every float type, -1 or the largest number in every integer type


@dataclass(frozen=True)
class Guards:
    """Copies of tensors in the middle of poison, with a check after their use.

    A read beyond a guarded tensor of floats gives NaN, which no check passes; `assert_whole` fails after a
    write beyond a guarded tensor or to it.
    """

    _guarded: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)

    def around(self, name: str, value: Any) -> Any:
        """Return a guarded copy of a tensor, or of all tensors in a tuple, list, mapping or typed weight.

        `value`: anything; other objects, and tensors that are not contiguous, are returned unchanged.
        `name`: of the tensors in messages.
        """
        if isinstance(value, Tensor):
            return self._guard(name, value) if value.is_contiguous() else value
        if isinstance(value, Weight):
            return value.holding({f: self.around(f"{name}.{f}", t) for f, t in value.fields().items()})
        if isinstance(value, Mapping):
            return {key: self.around(f"{name}[{key!r}]", each) for key, each in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.around(f"{name}[{at}]", each) for at, each in enumerate(value)))
        if isinstance(value, list | tuple):
            return type(value)(self.around(f"{name}[{at}]", each) for at, each in enumerate(value))
        return value

    def _guard(self, name: str, tensor: Tensor) -> Tensor:
        size = tensor.numel() * tensor.element_size()
        memory = torch.full((size + 2 * ZONE_BYTES,), POISON, dtype=torch.uint8, device=tensor.device)
        copy = memory[ZONE_BYTES : ZONE_BYTES + size].view(tensor.dtype).view(tensor.shape)
        copy.copy_(tensor)
        self._guarded.append((name, memory, memory.clone()))
        return copy

    def assert_whole(self) -> None:
        """Assert that guarded tensors, and the memory before and behind them, are unchanged."""
        __tracebackhide__ = True
        for name, memory, before in self._guarded:
            wrong = (memory != before).nonzero().flatten()
            if wrong.numel():
                first, size = int(wrong[0]) - ZONE_BYTES, memory.numel() - 2 * ZONE_BYTES
                place = "before" if first < 0 else "behind" if first >= size else "into"
                at = first - size if first >= size else first
                raise AssertionError(
                    f"the kernel wrote {place} {name}: {wrong.numel()} bytes differ, the first at byte {at}"
                )


def around_borders(*borders: int, most: int = 257) -> tuple[int, ...]:
    """Return numbers of tokens around changes of dispatch: `borders` and their neighbours, up to `most`.

    Without `borders`: 1, and around 8, 16, 24, 32, 64, 128 and 256, the borders of known kernels.
    """
    chosen = borders or (1, 8, 16, 24, 32, 64, 128, 256)
    return tuple(sorted({m for border in chosen for m in (border - 1, border, border + 1) if 1 <= m <= most}))
