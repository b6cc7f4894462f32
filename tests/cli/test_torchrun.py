"""Ranks of torchrun processes, and the merging of their errors."""

import math
import pickle

import pytest

from rankwise.auditing.text_inputs import Shard
from rankwise.cli.torchrun import Processes, as_rankwise_error, first_error, from_environment
from rankwise.errors import InputError, RankwiseError


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_shards_partition_the_items_in_order(world: int) -> None:
    for items in range(9):
        shares = [Shard(rank, world).of(range(items)) for rank in range(world)]
        assert [item for share in shares for item in share] == list(range(items))
        lengths = [len(share) for share in shares]
        assert max(lengths) - min(lengths) <= 1
        assert lengths[0] == math.ceil(items / world)


def test_variables_of_torchrun_are_read(monkeypatch) -> None:
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    found = from_environment()
    assert (found.rank, found.local_rank, found.world, found.several, found.is_main) == (1, 0, 2, True, False)
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(
        InputError, match="RANK, LOCAL_RANK and WORLD_SIZE as torchrun sets them, got RANK='2'"
    ):
        from_environment()


def test_each_process_has_the_gpu_of_its_number() -> None:
    assert Processes(5, 1, 8).device("cuda") == "cuda:1"
    assert Processes(5, 1, 8).device("cuda:0") == "cuda:0"
    assert Processes().device("cuda") == "cuda"


def test_an_error_that_all_have_names_no_process() -> None:
    error = RankwiseError("x", expected="y", got="z", fix="w")
    assert first_error([error, pickle.loads(pickle.dumps(error))]) is error
    assert str(first_error([None, error])).startswith("process 1 of 2: x: expected y, got z")
    other = "process 0 of 2: audit: expected no error, got KeyError: 'k'"
    assert str(first_error([as_rankwise_error(KeyError("k")), None])).startswith(other)
    assert first_error([None, None]) is None
