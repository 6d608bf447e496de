"""Sums of two GPUs through peer memory: bits, replays of graphs, and the loss of a rank."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.errors import ArgumentError
from qload.kernels.cuda.decoder_ops import add_norm
from qload.parallel import Collectives, collectives_of, joined_world, summed_and_normed
from qload.testing import assert_same_bits
from tests.support import torchrun

NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
pytestmark = [pytest.mark.gpu, NEEDS_TWO]

SHAPES = ((1, 8), (1, 8192), (3, 4104), (16, 8192), (33, 1000), (512, 4096), (512, 8192))
DTYPES = (torch.float16, torch.bfloat16)
REPLAYS = 1000


def drawn(seed: int, shape: tuple[int, ...], dtype: torch.dtype, world: int = 1) -> list[Tensor]:
    """Tensors of the ranks of a world."""
    generators = (torch.Generator().manual_seed(100 * seed + rank) for rank in range(world))
    return [torch.randn(shape, generator=generator).to(dtype) for generator in generators]


def bits(ranks: Any) -> None:
    """Compare sums with the CPU's in the order of ranks, rounded once, and norms with those of sums."""
    for dtype in DTYPES:
        for shape in SHAPES:
            each = drawn(1, shape, dtype, ranks.size())
            want, own = sum(part.float() for part in each).to(dtype), each[ranks.rank()].cuda()
            found = ranks.peers.summed(own)
            assert found is not None
            assert_same_bits(found.cpu(), want)
            (x,), (weight,) = drawn(2, shape, dtype), drawn(3, shape[1:], dtype)
            normed = summed_and_normed(ranks, own, x.cuda(), weight.cuda(), 1e-5)
            separate = add_norm(x.cuda(), want.cuda(), weight.cuda(), 1e-5)
            assert normed is not None
            assert separate is not None
            for got, other in zip(normed, separate, strict=True):
                assert_same_bits(got, other)
    assert ranks.peers.summed(torch.zeros(4096, 4096, device="cuda").half()) is None


def replays(ranks: Any) -> None:
    """A graph of short and long sums is right in every replay, and NCCL sums between them."""
    short, long = torch.zeros(16, 8192, device="cuda").half(), torch.zeros(512, 4096, device="cuda").half()
    graph, wrong = torch.cuda.CUDAGraph(), torch.zeros((), dtype=torch.int64, device="cuda")
    for values in (short, long):
        ranks.summed(values)  # loads the kernel, which a capture must not
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        sums = [ranks.summed(short), ranks.summed(long), ranks.summed(short[:1]), ranks.summed(long[:99])]
    for turn in range(REPLAYS):
        value, world = turn * 37 % 1001 / 256, ranks.size()
        short.fill_(value + ranks.rank())
        long.fill_(value - ranks.rank())
        graph.replay()
        more = world * (world - 1) / 2
        for got, sign in zip(sums, (1, -1, 1, -1), strict=True):
            wrong += (got != world * value + sign * more).sum()
        if turn % 100 == 0:
            wrong += (ranks.summed(short.float()) != world * value + more).sum()
    assert int(wrong) == 0


def killed(ranks: Any) -> None:
    """Rank 1 is killed while rank 0 waits for it on the GPU."""
    values = torch.ones(1024, device="cuda").half()
    ranks.summed(values)
    torch.cuda.synchronize()
    if ranks.rank():
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.summed(values)
    torch.cuda.synchronize()
    time.sleep(60)


def raises(ranks: Any) -> None:
    """Rank 0 raises an error while its GPU waits for rank 1."""
    if ranks.rank():
        time.sleep(60)
    ranks.summed(torch.ones(1024, device="cuda").half())
    raise ArgumentError("x", "one", "two")


WORKS = {work.__name__: work for work in (bits, replays, killed, raises)}


@pytest.mark.parametrize("work", ["bits", "replays"])
def test_two_gpus_sum_as_the_cpu_does(work: str) -> None:
    run = torchrun.ended(2, "-m", "tests.gpu.test_two_gpus", work)

    assert run.returncode == 0, run.stderr


def test_a_rank_that_waits_on_the_gpu_for_a_killed_one_names_it(tmp_path: Path) -> None:
    run = torchrun.ended(2, "-m", "tests.gpu.test_two_gpus", "killed", str(tmp_path))

    assert run.returncode != 0
    assert (tmp_path / "0").read_text() == "LostRankError: rank 1 of 2 is lost\n  reason   its process ended"


def test_an_error_is_raised_on_both_ranks_while_a_gpu_waits(tmp_path: Path) -> None:
    run = torchrun.ended(2, "-m", "tests.gpu.test_two_gpus", "raises", str(tmp_path))

    assert run.returncode != 0
    texts = {(tmp_path / str(rank)).read_text() for rank in range(2)}
    assert texts == {"ArgumentError: x\n  expected one\n  got      two"}


def main(work: str, *folder: str) -> None:
    """Do a work in the world that this process was launched into."""
    try:
        with joined_world("cuda", timeout_s=120) as group:
            ranks: Collectives = collectives_of(group)
            WORKS[work](ranks)
    except Exception as error:
        for each in folder:
            Path(each, str(group.rank())).write_text(f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
