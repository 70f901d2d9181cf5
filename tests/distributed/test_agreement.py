import pytest

from tests.harness import run_ranks
from ttv_train.checkpoint.lock import lock_run_folder
from ttv_train.errors import UserError
from ttv_train.parallel.agreement import on_all_ranks, on_main_rank


def collect(rank, world_size):
    return on_all_ranks(lambda: rank * 10), on_main_rank(lambda: f"from {rank}")


def test_every_rank_gets_every_result():
    assert run_ranks(3, collect) == [([0, 10, 20], "from 0")] * 3


class Unpicklable(Exception):  # noqa: N818
    def __init__(self, a, b):
        super().__init__(a + b)


def fail(rank, world_size, failures):
    def function():
        if rank in failures:
            raise failures[rank]

    with pytest.raises(Exception) as caught:
        on_all_ranks(function)
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("failures", "kind", "message"),
    [
        ({1: UserError("mend it")}, UserError, "mend it"),
        (
            {2: OSError(28, "No space left on device", "/disk/file")},
            OSError,
            "rank 2: [Errno 28] No space left on device: '/disk/file'",
        ),
        ({1: OSError("first"), 2: UserError("second")}, OSError, "rank 1: first"),
    ],
)
def test_a_failure_is_raised_on_every_rank(failures, kind, message):
    assert run_ranks(3, fail, failures) == [(kind, message)] * 3


def fail_oddly(rank, world_size):
    with pytest.raises(RuntimeError) as caught:
        on_main_rank(lambda: (_ for _ in ()).throw(Unpicklable("a", "b")))
    return str(caught.value)


def test_an_unexpected_exception_arrives_with_its_traceback():
    for message in run_ranks(2, fail_oddly):
        assert message.startswith("rank 0: Traceback")
        assert "Unpicklable: ab" in message


def lock_twice(rank, world_size, folder):
    with lock_run_folder(folder), pytest.raises(UserError, match="in use by process"), lock_run_folder(folder):
        pass
    with lock_run_folder(folder):
        return True


def test_a_locked_folder_is_refused_on_every_rank(tmp_path):
    assert run_ranks(3, lock_twice, tmp_path) == [True] * 3
