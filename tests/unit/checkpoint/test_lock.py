import json
import multiprocessing
import os
import signal
import socket

import pytest

from ttv_train.checkpoint.lock import LOCK_FILE, lock_run_folder
from ttv_train.errors import UserError

fork = multiprocessing.get_context("fork")


def hold(folder, connection, worker=False):
    """Holds the lock until it is killed, with a forked child that outlives it if asked for."""
    with lock_run_folder(folder):
        child = os.fork() if worker else None
        if child == 0:
            signal.pause()
        connection.send(child)
        signal.pause()


def start_holder(folder, worker=False):
    ours, theirs = fork.Pipe()
    process = fork.Process(target=hold, args=(folder, theirs, worker))
    process.start()
    return process, ours.recv()


def kill(process):
    process.kill()
    process.join()


def test_a_second_run_is_told_who_holds_the_folder(tmp_path):
    process, _ = start_holder(tmp_path / "run")
    try:
        with pytest.raises(UserError) as caught, lock_run_folder(tmp_path / "run"):
            pass
        message = str(caught.value)
        assert f"output_dir {tmp_path / 'run'} is in use by process {process.pid} on host" in message
        assert socket.gethostname() in message
    finally:
        kill(process)


def test_a_killed_run_leaves_no_lock(tmp_path):
    process, _ = start_holder(tmp_path)
    kill(process)
    with lock_run_folder(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()


def test_a_worker_that_outlives_a_killed_run_does_not_keep_its_lock(tmp_path):
    process, worker = start_holder(tmp_path, worker=True)
    try:
        kill(process)
        os.kill(worker, 0)  # it lives
        with lock_run_folder(tmp_path):
            assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_the_lock_survives_its_workers(tmp_path):
    with lock_run_folder(tmp_path):
        worker = fork.Process(target=os.getpid)
        worker.start()
        worker.join()
        with pytest.raises(UserError, match=f"process {os.getpid()}"), lock_run_folder(tmp_path):
            pass


def test_it_ends_with_the_block_also_by_an_exception(tmp_path):
    with pytest.raises(KeyError), lock_run_folder(tmp_path):
        raise KeyError
    with lock_run_folder(tmp_path), lock_run_folder(tmp_path / "other"):
        assert (tmp_path / "other" / LOCK_FILE).exists()


def test_an_unreadable_note_does_not_hide_the_lock(tmp_path):
    with lock_run_folder(tmp_path):
        (tmp_path / LOCK_FILE).write_text("{")
        with pytest.raises(UserError, match="in use by another run"), lock_run_folder(tmp_path):
            pass


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"output_dir .*Not a directory"), lock_run_folder(tmp_path / "file" / "run"):
        pass
