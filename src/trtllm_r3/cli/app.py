"""The commands and their options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__
from .engine import EngineOptions

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="The experts that a rollout on TensorRT-LLM really took, row by row.",
)

_SAMPLING = "Sampling (a line of the prompts may say otherwise)"
_ENGINE = "Engine (default: its own; on the stand-in batches of 16 and steps of 1024 tokens)"


def _sampling(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=_SAMPLING, **more)


def _engine(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=_ENGINE, **more)


_File = {"exists": True, "dir_okay": False, "readable": True}
_Dir = {"exists": True, "file_okay": False}
Model = Annotated[Path, typer.Option(help="Directory of a Hugging Face checkpoint.", **_Dir)]
Prompts = Annotated[
    Path, typer.Option(help='One JSON a line: {"prompt": ...} or {"prompt_token_ids": [...]}.', **_File)
]
Out = Annotated[
    Path, typer.Option(file_okay=False, help="Folder of the results; give it again to go on after a stop.")
]
InFlight = Annotated[int, typer.Option(help="Prompts that the engine has at once.", min=1)]
ShardPrompts = Annotated[int, typer.Option(help="Prompts to a shard of routes.", min=1)]
Answers = Annotated[int, _sampling("Answers to a prompt.", "--n", min=1)]
MaxTokens = Annotated[int, _sampling("Longest answer.", min=1)]
Temperature = Annotated[float | None, _sampling("0 or not given, nor top-p, nor top-k: greedy.", min=0)]
TopP = Annotated[float | None, _sampling("Sample from the most likely tokens of this mass.", min=0, max=1)]
TopK = Annotated[int | None, _sampling("Sample from this many tokens.", min=0)]
Seed = Annotated[int, _sampling("Each prompt's own seed is derived from it.", min=0)]
Stop = Annotated[list[str] | None, _sampling("A string that ends an answer; may be repeated.")]
EndId = Annotated[int | None, _sampling("The token that ends an answer, if not the tokenizer's.", min=-1)]
Tokenizer = Annotated[Path | None, _engine("Directory of the tokenizer, if not the model's.", **_Dir)]
Chunked = Annotated[bool | None, _engine("Split long prompts.", "--chunked-prefill/--no-chunked-prefill")]
Overlap = Annotated[bool | None, _engine("Prepare a step while the last one runs.", "--overlap/--no-overlap")]
Graphs = Annotated[bool | None, _engine("Replay recorded steps.", "--cuda-graphs/--no-cuda-graphs")]
Reuse = Annotated[
    bool,
    _engine("Reuse the KV of equal prefixes, whole blocks of it.", "--block-reuse/--no-block-reuse"),
]
MaxBatchSize = Annotated[int | None, _engine("Most requests in a step.", min=1)]
MaxNumTokens = Annotated[int | None, _engine("Most tokens in a step.", min=1)]
MaxSeqLen = Annotated[int | None, _engine("Longest prompt plus answer.", min=1)]
KvTokens = Annotated[int | None, _engine("Tokens that the KV cache holds.", min=1)]
MoeBackend = Annotated[str | None, _engine("One that routes outside its kernel, e.g. CUTLASS.")]
MoeMaxNumTokens = Annotated[int | None, _engine("Most tokens at once in a MoE layer.", min=1)]
SingleProcess = Annotated[bool, _engine("Run the engine in this process.", "--single-process")]
EngineOption = Annotated[
    list[str] | None, _engine("NAME=JSON: any other argument of LLM; may be repeated.", "--engine-option")
]


@app.command()
def rollout(
    model: Model,
    prompts: Prompts,
    out: Out,
    n: Answers = 1,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = 0,
    stop: Stop = None,
    end_id: EndId = None,
    in_flight: InFlight = 256,
    shard_prompts: ShardPrompts = 64,
    tokenizer: Tokenizer = None,
    chunked_prefill: Chunked = None,
    overlap: Overlap = None,
    cuda_graphs: Graphs = None,
    block_reuse: Reuse = True,
    max_batch_size: MaxBatchSize = None,
    max_num_tokens: MaxNumTokens = None,
    max_seq_len: MaxSeqLen = None,
    kv_tokens: KvTokens = None,
    moe_backend: MoeBackend = None,
    moe_max_num_tokens: MoeMaxNumTokens = None,
    single_process: SingleProcess = False,
    engine_option: EngineOption = None,
) -> None:
    """Run prompts and keep each answer with the experts of each of its tokens."""
    raise typer.Exit(_rollout(dict(locals())))


def _rollout(given: dict[str, Any]) -> int:
    from . import commands

    names = ("n", "max_tokens", "temperature", "top_p", "top_k", "stop", "end_id")
    sampling = {name: given[name] for name in names if given[name] not in (None, [])}
    text = {name: None if given[name] is None else str(given[name]) for name in ("model", "tokenizer")}
    fields = (f for f in EngineOptions.__dataclass_fields__ if f not in ("model", "tokenizer", "extra"))
    options = EngineOptions(
        model=str(text["model"]),
        tokenizer=text["tokenizer"],
        extra=_extra(given["engine_option"] or []),
        **{name: given[name] for name in fields},
    )
    keys = ("prompts", "out", "seed", "in_flight", "shard_prompts", "single_process")
    return commands.rollout(options, sampling, **{key: given[key] for key in keys})


def _extra(pairs: list[str]) -> dict[str, Any]:
    extra = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        try:
            extra[name] = json.loads(value)
        except ValueError:
            equals = ""
        if not equals:
            raise typer.BadParameter(f"expected NAME=JSON, found {pair!r}", param_hint="--engine-option")
    return extra


Count = Annotated[int, typer.Option("--prompts", help="How many prompts to run.", min=1)]
DemoOut = Annotated[
    Path | None,
    typer.Option(file_okay=False, help="Where to work; kept. Default: a folder that is removed."),
]
Keep = Annotated[bool, typer.Option("--keep", help="Keep the folder and say where it is.")]


@app.command()
def demo(out: DemoOut = None, prompts: Count = 64, keep: Keep = False) -> None:
    """Run a small model on real text, here and now, and check every row against Hugging Face transformers."""
    from . import commands

    raise typer.Exit(commands.demo(out, prompts, keep))


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"trtllm-r3 {__version__}")
        raise typer.Exit(0)
