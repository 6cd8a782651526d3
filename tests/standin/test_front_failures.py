"""The engine does not come up, its loop breaks, or its process dies: everybody is told, nobody waits."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

import trtllm_r3.standin

trtllm_r3.standin.install()

from support.fake_engine import CRASH, RAISE, SLOW, InProcess, InWorker, numbers  # noqa: E402
from tensorrt_llm import LLM, SamplingParams  # noqa: E402
from tensorrt_llm.llmapi import RequestError  # noqa: E402


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def start(model_dir: Path, executor_cls: type, **options: object) -> LLM:
    return LLM(model=model_dir, skip_tokenizer_init=True, executor_cls=executor_cls, **options)


def params(**options: object) -> SamplingParams:
    return SamplingParams(**{"end_id": 999, "max_tokens": 4, **options})


def test_an_error_of_the_construction_comes_out_of_the_constructor(model_dir):
    with pytest.raises(ValueError, match="no such engine"):
        start(model_dir, InProcess, env_overrides={"TLLM_FAKE_ENGINE": "broken"})
    with pytest.raises(RuntimeError, match="Executor worker returned error") as caught:
        start(model_dir, InWorker, env_overrides={"TLLM_FAKE_ENGINE": "broken"})
    assert isinstance(caught.value.__cause__, ValueError)
    assert str(caught.value.__cause__) == "no such engine"


def test_a_process_that_dies_before_it_is_ready_is_an_error(model_dir):
    with pytest.raises(RuntimeError, match="died during initialization") as caught:
        start(model_dir, InWorker, env_overrides={"TLLM_FAKE_ENGINE": "dies"})
    assert "exit code 4" in str(caught.value.__cause__)


def test_a_dying_process_fails_all_waiting_requests(model_dir):
    llm = start(model_dir, InWorker)
    waiting = [llm.generate_async([SLOW], params(max_tokens=50)) for _ in range(3)]
    last = llm.generate_async([CRASH], params())
    for future in [*waiting, last]:
        with pytest.raises(Exception, match="exit code 3"):
            future.result(timeout=20)
    with pytest.raises(RuntimeError, match="shutting down"):
        llm.generate_async([1], params())
    llm.shutdown()


@pytest.mark.parametrize("executor_cls", [InProcess, InWorker], ids=["in process", "in worker"])
def test_a_broken_loop_fails_all_waiting_requests(model_dir, executor_cls):
    llm = start(model_dir, executor_cls)
    waiting = [llm.generate_async([SLOW], params(max_tokens=50)), llm.generate_async([RAISE], params())]
    for future in waiting:
        with pytest.raises((RequestError, RuntimeError), match="the loop broke"):
            future.result(timeout=20)
    with pytest.raises(RuntimeError):
        llm.generate_async([1], params()).result(timeout=20)
    with pytest.raises(RuntimeError):
        llm.generate_async([1], params()).result(timeout=20)


def test_a_dropped_llm_ends_its_worker(model_dir):
    llm = start(model_dir, InWorker)
    assert llm.generate([2], params(), use_tqdm=False).outputs[0].token_ids == numbers([2], 4)
    process, reference = llm._executor.mpi_session.mpi_pool[0].process, weakref.ref(llm)
    del llm
    gc.collect()
    assert reference() is None
    assert not process.is_alive()


def test_a_script_that_forgets_to_shut_down_ends_and_so_does_its_worker(model_dir):
    script = model_dir / "script.py"
    script.write_text(
        f"import sys\nsys.path[:0] = {[p for p in sys.path if p]!r}\n"
        "import trtllm_r3.standin\ntrtllm_r3.standin.install()\n"
        "from support.fake_engine import InWorker, SLOW\n"
        "from tensorrt_llm import LLM, SamplingParams\n"
        "if __name__ == '__main__':\n"
        f"    llm = LLM(model={str(model_dir)!r}, skip_tokenizer_init=True, executor_cls=InWorker)\n"
        "    future = llm.generate_async([SLOW], SamplingParams(end_id=1, max_tokens=50))\n"
        "    print(llm._executor.mpi_session.mpi_pool[0].process.pid)\n"
    )
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)
