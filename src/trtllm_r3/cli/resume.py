"""Takes up an interrupted run: whose folder it is, what is finished, what a crash left half done."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from .shards import FORMAT, ROLLOUTS, RUN, replace_file, shard_number, sync


class RunRefused(Exception):
    """The folder holds something else; the message says what differs and what to do."""


def locked(path: Path) -> BinaryIO:
    """Keep other processes out until the file that is returned is closed. Raises RunRefused."""
    handle = (path / ".lock").open("wb")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.close()
        raise RunRefused(f"{path} is being written by another process: wait for it or end it") from None
    return handle


def check_made_with(path: Path, made_with: Mapping[str, Any]) -> None:
    """Write run.json into a new folder; refuse a folder that was made with something else."""
    run, wanted = path / RUN, json.loads(json.dumps({"format": FORMAT, **made_with}))
    answers = path / ROLLOUTS
    if not run.exists() or not answers.exists() or not answers.stat().st_size:
        if answers.exists() and not run.exists():
            raise RunRefused(f"{path} has a {ROLLOUTS} but no {RUN}: choose another --out")
        replace_file(run, (json.dumps(wanted, indent=2) + "\n").encode())
        return
    try:
        there = json.loads(run.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise RunRefused(f"{run} is not JSON ({exc}): choose another --out") from None
    differing = sorted(name for name in {*there, *wanted} if there.get(name) != wanted.get(name))
    if differing:
        what = "; ".join(f"{n} was {there.get(n)!r}, now {wanted.get(n)!r}" for n in differing)
        raise RunRefused(f"{path} holds another run ({what}). Choose another --out, or the same options.")


def recover(path: Path) -> tuple[dict[int, str], int]:
    """Finished lines with their digests, and the next shard's number.

    Lines of a prompt that is not whole are cut off; shards that no line refers to are removed.
    """
    groups = _whole_groups(path / ROLLOUTS)
    used = {r["routes"]["file"] for group in groups for r in group} - {None}
    for shard in path.glob("routes-*"):
        if shard.name not in used:
            shard.unlink()
    gone = sorted(name for name in used if not (path / name).exists())
    if gone:
        raise RunRefused(f"{path / gone[0]} is gone, {ROLLOUTS} needs it: put it back or choose another")
    finished = {group[0]["line"]: group[0]["digest"] for group in groups}
    return finished, max(map(shard_number, used), default=-1) + 1


def _whole_groups(path: Path) -> list[list[dict[str, Any]]]:
    """The records of each whole prompt; the file is cut after the last of them."""
    if not path.exists():
        return []
    groups: list[list[dict[str, Any]]] = []
    pending: list[dict[str, Any]] = []
    end = position = 0
    with path.open("r+b") as file:
        lines = file.read().splitlines(keepends=True)
        for number, raw in enumerate(lines, 1):
            position += len(raw)
            record = _record(raw)
            if record is None:
                if number < len(lines):
                    raise RunRefused(f"{path} line {number} is damaged: repair it or choose another --out")
                break
            pending.append(record)
            if len(pending) == record["answers"]:
                groups.append(pending)
                pending, end = [], position
        file.truncate(end)
        sync(file)
    return groups


def _record(raw: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(raw) if raw.endswith(b"\n") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) and "answers" in record else None
