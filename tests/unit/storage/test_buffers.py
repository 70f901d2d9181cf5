import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ttv_train.storage.buffers import SIZE_STEP, BufferPool


def address(view: memoryview) -> int:
    return torch.frombuffer(view, dtype=torch.uint8).data_ptr()


def test_memory_is_used_again_only_when_nothing_refers_to_it():
    pool = BufferPool()
    first = pool.take(SIZE_STEP + 10)
    assert (len(first), first.readonly) == (SIZE_STEP + 10, False)
    place, tensor = address(first), torch.frombuffer(first[100:108], dtype=torch.float32)
    del first
    assert pool.kept_bytes() == 0  # a tensor of two values keeps it
    other = pool.take(SIZE_STEP + 10)
    assert address(other) != place
    tensor.fill_(1.0)
    view = tensor[1:]
    del tensor
    assert (pool.kept_bytes(), view.tolist()) == (0, [1.0])
    del view
    assert pool.kept_bytes() == 2 * SIZE_STEP
    assert address(pool.take(2 * SIZE_STEP)) == place


@pytest.mark.parametrize("length", [0, 1, SIZE_STEP - 1])
def test_small_reads_take_memory_of_their_own(length):
    pool = BufferPool()
    assert len(pool.take(length)) == length
    assert pool.kept_bytes() == 0


def test_no_more_is_kept_than_allowed():
    pool = BufferPool(max_kept_bytes=3 * SIZE_STEP)
    lent = [pool.take(SIZE_STEP) for _ in range(8)]
    lent.append(pool.take(4 * SIZE_STEP))
    lent.clear()
    assert pool.kept_bytes() == 3 * SIZE_STEP


def test_threads_never_share_memory():
    pool = BufferPool()

    def work(seed: int) -> bool:
        generator, held, intact = random.Random(seed), [], True
        for number in range(60):
            view = pool.take(SIZE_STEP * generator.randint(1, 2))
            mark = bytes([seed * 16 % 251, number])
            view[:2] = view[-2:] = mark
            held.append((view, mark))
            if len(held) > generator.randint(0, 5):
                view, mark = held.pop(generator.randrange(len(held)))
                intact &= view[:2] == view[-2:] == mark
        return intact and all(view[:2] == view[-2:] == mark for view, mark in held)

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(work, range(12)))
