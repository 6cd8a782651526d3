"""What the commands do around the work itself: messages, progress bars, exit codes."""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from . import engine, model_files
from . import rollout as work
from .prompts import BadLine, count_prompts
from .resume import RunRefused
from .store import RunFolder

GOOD, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def say(text: str, style: str = "") -> None:
    """A message to standard error, on one line however long it is."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(text, style=style, markup=False)


def rollout(
    options: engine.EngineOptions,
    sampling: Mapping[str, Any],
    *,
    prompts: Path,
    out: Path,
    seed: int,
    in_flight: int,
    shard_prompts: int,
    single_process: bool,
) -> int:
    """`trtllm-r3 rollout`. Returns the exit code."""
    if single_process:
        engine.in_this_process()
    try:
        name = announced()
        model = Path(options.model)
        engine.sampling_params(**sampling)
        made_with = model_files.made_with(name, model, sampling, seed)
        folder = RunFolder(out, made_with, shard_prompts)
    except (RunRefused, ValueError, OSError, RuntimeError, ImportError) as exc:
        say(f"{type(exc).__name__}: {exc}", "red")
        return USAGE
    with contextlib.closing(folder):
        llm = built(options)
        if llm is None:
            return USAGE
        if llm.tokenizer is None:
            sampling = {**model_files.without_tokenizer(model), **sampling}
        with _shut_down_after(llm), _ended_like_ctrl_c(), _progress(prompts) as progress:
            job = work.Rollout(llm, folder, sampling, seed=seed, in_flight=in_flight, progress=progress)
            code = _run(job, prompts, model_files.vocabulary(model))
    _print_summary(job.summary, out)
    return code


def announced() -> engine.Engine:
    """Choose the engine and say which it is."""
    name = engine.choose()
    if not name.is_stock:
        say(f"engine: {name}, since TensorRT-LLM is not installed")
        return name
    say(f"engine: {name}")
    say(
        f"warning: {name} has not passed `selftest` (which is not built yet), and this package has not been "
        "run on stock TensorRT-LLM so far. Check routes before you train on them.",
        "yellow",
    )
    return name


def built(options: engine.EngineOptions) -> Any:
    """The LLM, or None after saying why there is none."""
    try:
        return engine.build(options)
    except (Exception, SystemExit) as exc:
        say("the engine cannot be built this way:", "red")
        link: BaseException | None = exc
        while link is not None:
            say(f"  {type(link).__name__}: {link}", "red")
            link = link.__cause__
        return None


def _run(job: work.Rollout, prompts: Path, vocab_size: int | None) -> int:
    try:
        summary = job.run(prompts, vocab_size)
    except RunRefused as exc:
        say(str(exc), "red")
        return USAGE
    except KeyboardInterrupt:
        say("interrupted: what is finished is kept, the same command goes on from there", "yellow")
        return INTERRUPTED
    except Exception as exc:
        say(f"stopped by {type(exc).__name__}: {exc}", "red")
        say("what is finished is kept, the same command goes on from there", "yellow")
        return FAILED
    return FAILED if summary.bad else GOOD


@contextlib.contextmanager
def _shut_down_after(llm: Any) -> Iterator[None]:
    """End the engine; whatever that runs into, the results are on disk."""
    try:
        yield
    finally:
        try:
            llm.shutdown()
        except Exception as exc:
            say(f"the engine did not end by itself: {type(exc).__name__}: {exc}", "yellow")


@contextlib.contextmanager
def _ended_like_ctrl_c() -> Iterator[None]:
    """SIGTERM, as a batch system sends it, ends the run as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _progress(prompts: Path) -> Iterator[work.Progress]:
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("prompts", total=count_prompts(prompts))

        def complain(bad: BadLine) -> None:
            bar.console.print(f"line {bad.line}: {bad.error}", style="red", markup=False)

        yield work.Progress(lambda: bar.advance(task), complain)


def _print_summary(summary: work.Summary, out: Path) -> None:
    table = Table(title=str(out), show_header=False, title_justify="left")
    rate = summary.tokens / summary.seconds if summary.seconds else 0.0
    rows = [
        ("prompts finished", f"{summary.finished}"),
        ("finished before", f"{summary.skipped}"),
        ("bad lines", f"{summary.bad}"),
        ("generated tokens", f"{summary.tokens} ({rate:.0f}/s)"),
        ("rows of routes", f"{summary.rows}"),
        ("missing rows", f"{summary.missing}" + _causes(summary.causes)),
        ("answers without routes", f"{summary.without}"),
    ]
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)


def _causes(causes: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{cause}: {n}' for cause, n in sorted(causes.items()))})" if causes else ""


def demo(out: Path | None, prompts: int, keep: bool) -> int:
    """`trtllm-r3 demo`. Returns the exit code."""
    from .demo import run_demo

    if out is not None and out.exists() and any(out.iterdir()):
        say(f"{out} is not empty: choose another --out", "red")
        return USAGE
    announced()
    console = Console(highlight=False)
    with contextlib.ExitStack() as stack:
        root = out
        if root is None and not keep:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trtllm-r3-demo-")))
        elif root is None:
            root = Path(tempfile.mkdtemp(prefix="trtllm-r3-demo-"))
        good = run_demo(root, prompts, console)
        if out is not None or keep:
            console.print(f"kept: {root}", soft_wrap=True)
    return GOOD if good else FAILED
