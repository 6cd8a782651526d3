"""Shards of routes: what is in them, how they get on disk, how they are read."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from ..flow.routes import Routes

FORMAT = 1
ROLLOUTS, ERRORS, RUN = "rollouts.jsonl", "errors.jsonl", "run.json"


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"routes-{number:05d}.safetensors"


def shard_number(name: str) -> int:
    """The reverse of `shard_name`."""
    return int(name.removeprefix("routes-").removesuffix(".safetensors"))


def reference(routes: Routes, shard: str, key: str) -> dict[str, Any]:
    """What a line of rollouts.jsonl says of its routes."""
    there = routes.ids is not None
    return {
        "file": shard if there else None,
        "key": key if there else None,
        "why_none": routes.why_none,
        "rows": len(routes),
        "start": routes.start,
        "missing": int(routes.missing.sum()),
        "gaps": [list(gap) for gap in routes.gaps],
        "versions": [list(run) for run in routes.versions],
    }


def write_shard(path: Path, routes: Mapping[str, Routes]) -> None:
    """Write it beside its place, then move it there."""
    tensors = {key: r.ids.contiguous() for key, r in routes.items() if r.ids is not None}
    replace_file(path, save(tensors, _metadata(routes)))


def append_lines(path: Path, records: Sequence[Mapping[str, Any]], end: int) -> int:
    """Put records as lines at offset `end`; they are on disk when this returns the new end.

    What lies behind `end` is of an earlier attempt at the same records, and goes.
    """
    path.touch()
    with path.open("r+b") as file:
        file.truncate(end)
        file.seek(end)
        file.write("".join(json.dumps(record) + "\n" for record in records).encode())
        sync(file)
        return file.tell()


def read_rollouts(path: Path) -> Iterator[tuple[dict[str, Any], torch.Tensor | None]]:
    """Each answer's record with its routes, int16 [T, L, K] or None."""
    with contextlib.ExitStack() as stack, (path / ROLLOUTS).open(encoding="utf-8") as lines:
        shards: dict[str, Any] = {}
        for line in lines:
            record = json.loads(line)
            name, key = record["routes"]["file"], record["routes"]["key"]
            if name is not None and name not in shards:
                shards[name] = stack.enter_context(safe_open(str(path / name), "pt"))
            yield record, None if name is None else shards[name].get_tensor(key)


def _metadata(routes: Mapping[str, Routes]) -> dict[str, str]:
    one = next(iter(routes.values()))
    entries = {
        key: {
            "shape": [len(r), len(r.moe_layer_ids), r.top_k],
            "start": r.start,
            "gaps": [list(gap) for gap in r.gaps],
            "versions": [list(run) for run in r.versions],
        }
        for key, r in routes.items()
    }
    return {
        "format": "trtllm-r3-routes",
        "format_version": str(FORMAT),
        "axes": "token, moe layer, expert slot",
        "dtype": "int16",
        "missing": "-1",
        "moe_layer_ids": json.dumps(list(one.moe_layer_ids)),
        "num_experts": str(one.num_experts),
        "top_k": str(one.top_k),
        "entries": json.dumps(entries),
    }


def replace_file(path: Path, data: bytes) -> None:
    """The file is either what it was or `data`, whenever the machine stops."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        sync(file)
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def sync(file: Any) -> None:
    """Python's buffer and the system's to disk."""
    file.flush()
    os.fsync(file.fileno())
