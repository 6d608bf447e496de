"""What Marlin's kernel divides its work by: group sizes, thread blocks, padding, locks.

A thread block takes 128 rows of 64 columns, or 64 rows of 128; other shapes are padded. The
shape rule is that of the compiled kernels, not the stricter one of the Python in front of some of them.
"""

from math import lcm

GROUP_SIZES = (-1, 32, 64, 128)  # of the kernels
THREAD_BLOCKS = ((64, 128), (128, 64))  # columns, rows
MIN_THREAD_N = 64
MAX_PARALLEL = 16
LOCKS_PER_MULTIPROCESSOR = 4
SPARSE_MIN_THREAD_N = 128
SPARSE_MAX_PARALLEL = 64


def divides(N: int, K: int) -> bool:
    """Whether thread blocks divide a layer without padding."""
    return any(N % columns == 0 and K % rows == 0 for columns, rows in THREAD_BLOCKS)


def padded(N: int, K: int, group_size: int) -> tuple[int, int]:
    """(N, K) padded to whole thread blocks and whole groups: the smallest area, then the smallest sum."""
    group = max(group_size, 1)
    sizes = [(_up(N, columns), _up(K, lcm(rows, group))) for columns, rows in THREAD_BLOCKS]
    return min(sizes, key=lambda size: (size[0] * size[1], sum(size)))


def cut(group_size: int) -> tuple[int, int] | None:
    """The largest group that kernels read, and how many of them a group is; None: it is no multiple of one.

    Groups of 256 rows are two of 128 that have one scale.
    """
    if group_size in GROUP_SIZES:
        return group_size, 1
    sizes = [size for size in GROUP_SIZES if size > 0 and group_size % size == 0]
    return (max(sizes), group_size // max(sizes)) if sizes and group_size > 0 else None


def locks(N: int, multiprocessors: int, *, sparse: bool = False) -> int:
    """How many int32 of zeroed workspace serve N columns: enough for the old kernels' rule and the new.

    The old one counts blocks of columns, 16 (2:4: 64) times over; the new one multiprocessors, four
    blocks on each at the most.
    """
    if sparse:
        return -(-N // SPARSE_MIN_THREAD_N) * SPARSE_MAX_PARALLEL
    return max(-(-N // MIN_THREAD_N) * MAX_PARALLEL, LOCKS_PER_MULTIPROCESSOR * multiprocessors)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
