"""The helper that every distributed test trusts: results in order, first failure named, no hang."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import RankError, run_ranks

pytestmark = pytest.mark.distributed


def _sum(rank, world, scale):
    value = torch.full((3,), float(rank + 1)) * scale
    dist.all_reduce(value)
    return rank, world, torch.get_num_threads(), value


def _one_fails(rank, world):
    if rank == 1:
        raise KeyError("the cause")
    dist.barrier()


def _one_is_killed(rank, world):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _never_ends(rank, world):
    while rank == 0:
        time.sleep(0.1)


def test_returns_in_rank_order():
    results = run_ranks(_sum, 2, 2.0)
    assert [r[:3] for r in results] == [(0, 2, 1), (1, 2, 1)]
    assert all(torch.equal(r[3], torch.full((3,), 6.0)) for r in results)


def test_first_failure_is_reported():
    with pytest.raises(RankError, match=r"rank 1 of 2 failed:(.|\n)*KeyError: 'the cause'"):
        run_ranks(_one_fails, 2)


def test_killed_rank_is_reported():
    with pytest.raises(RankError, match="rank 0 of 2 died with exit code -9"):
        run_ranks(_one_is_killed, 2)


@pytest.mark.slow
def test_time_out_kills_and_shows_where():
    with pytest.raises(RankError, match=r"ranks \[0\] did not end within 20 s(.|\n)*in _never_ends"):
        run_ranks(_never_ends, 2, timeout=20)
