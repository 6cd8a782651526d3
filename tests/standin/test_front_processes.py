"""Worker processes and the queues to them."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
from concurrent.futures import BrokenExecutor
from pathlib import Path

import pytest
import torch

import trtllm_r3.standin

trtllm_r3.standin.install()

from support import pool_tasks  # noqa: E402
from tensorrt_llm.executor.ipc import FusedIpcQueue, IpcQueue  # noqa: E402
from tensorrt_llm.llmapi.mpi_session import MpiPoolSession  # noqa: E402


@pytest.fixture
def session():
    session = MpiPoolSession(n_workers=1)
    yield session
    session.shutdown_abort(grace=10)


def test_a_task_runs_in_another_process_with_this_path_and_environment(session, monkeypatch):
    monkeypatch.setenv("TLLM_FRONT_TEST", "here")
    pid, path, value = session.submit_sync(pool_tasks.where_am_i, "TLLM_FRONT_TEST")[0]
    assert pid != os.getpid()
    assert set(sys.path) - {""} <= set(path)
    assert value == "here"


def test_every_worker_runs_the_task(session):
    session.n_workers = 2
    assert len({pid for pid, _, _ in session.submit_sync(pool_tasks.where_am_i, "HOME")}) == 2


def test_the_first_task_decides_what_is_imported(session):
    before = session.submit_sync(pool_tasks.imported, "tensorrt_llm", "torch", "transformers")[0]
    assert before == {"tensorrt_llm": False, "torch": False, "transformers": False}


def test_an_exception_of_a_task_comes_back_with_its_traceback(session):
    with pytest.raises(KeyError, match="lost") as caught:
        session.submit_sync(pool_tasks.fail, KeyError("lost"))
    assert "in fail" in str(caught.value.__cause__)
    with pytest.raises(RuntimeError, match="cannot be pickled"):
        session.submit_sync(pool_tasks.unpicklable)
    assert session.submit_sync(pool_tasks.where_am_i, "HOME")


def test_a_dying_process_breaks_its_tasks_and_those_behind(session):
    futures = [session.submit(pool_tasks.die, 5)[0], session.submit(pool_tasks.where_am_i, "HOME")[0]]
    for future in futures:
        with pytest.raises(BrokenExecutor, match="exit code 5"):
            future.result(timeout=20)


def test_abort_kills_a_worker_that_does_not_end(session):
    future = session.submit(pool_tasks.sleep_for_ever)[0]
    assert session.submit is not None
    session.abort()
    with pytest.raises(BrokenExecutor):
        future.result(timeout=20)


def test_a_session_cannot_be_pickled(session):
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(session)


def test_a_script_with_a_guarded_entry_can_use_a_pool(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nsys.path[:0] = {[p for p in sys.path if p]!r}\n"
        "import trtllm_r3.standin\ntrtllm_r3.standin.install()\n"
        "from tensorrt_llm.llmapi.mpi_session import MpiPoolSession\n"
        "def task(x):\n    return x + 1\n"
        "if __name__ == '__main__':\n    print(MpiPoolSession(n_workers=1).submit_sync(task, 41))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[42]"), done.stderr


# ---- queues ----


@pytest.fixture
def pair():
    server = IpcQueue(is_server=True, name="server")
    client = IpcQueue(server.address, is_server=False, name="client")
    yield server, client
    client.close()
    server.close()


def test_objects_cross_in_both_directions(pair):
    server, client = pair
    for sender, receiver in ((client, server), (server, client)):
        assert not receiver.poll(0)
        sender.put({"a": [1]})
        assert receiver.poll(5)
        assert receiver.get() == {"a": [1]}


def test_tensors_are_copied_not_shared(pair):
    server, client = pair
    tensor = torch.arange(100_000)
    client.put(tensor)
    tensor.zero_()
    assert torch.equal(server.get(), torch.arange(100_000))


def test_many_threads_may_put(pair):
    server, client = pair
    threads = [threading.Thread(target=client.put, args=([i] * 20_000,)) for i in range(20)]
    for thread in threads:
        thread.start()
    got = [server.get() for _ in threads]
    assert sorted(g[0] for g in got) == list(range(20))
    assert all(g == [g[0]] * 20_000 for g in got)


def test_strangers_without_the_key_are_turned_away():
    server = IpcQueue(is_server=True, name="server")
    endpoint, key = server.address
    stranger = IpcQueue((endpoint, bytes(32)), is_server=False)
    stranger.put("bad")
    silent = socket.create_connection(("127.0.0.1", int(endpoint.rsplit(":", 1)[1])))
    client = IpcQueue((endpoint, key), is_server=False)
    client.put("good")
    assert server.get() == "good"
    for end in (stranger, silent, client, server):
        end.close()


def test_a_reader_learns_that_the_other_end_is_gone(pair):
    server, client = pair
    client.close()
    with pytest.raises(EOFError):
        server.get()
    lonely = IpcQueue(is_server=True, name="lonely")
    threading.Timer(0.1, lonely.close).start()
    with pytest.raises(EOFError, match="closed"):
        lonely.get()


def test_sending_without_an_other_end_does_not_block():
    server = IpcQueue(is_server=True, name="server")
    assert not server.put_noblock("anything")
    server.close()
    assert not server.put_noblock("anything")


def test_a_fused_queue_sends_lists():
    server = FusedIpcQueue(is_server=True, name="server")
    client = FusedIpcQueue(server.address, is_server=False, name="client")
    client.put(1)
    client.put([2, 3])
    client.put(None)
    assert [server.get(), server.get(), server.get()] == [[1], [2, 3], [None]]
    client.close()
    server.close()


def test_the_temporary_directory_is_not_needed(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / ("long" * 50)))
    server = IpcQueue(is_server=True)
    IpcQueue(server.address, is_server=False).close()
    server.close()
