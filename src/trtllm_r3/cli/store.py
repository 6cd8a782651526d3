"""The output folder of a rollout: crash-safe, resumable, readable with json and safetensors alone.

run.json                    what the folder was made with; another model or other sampling is refused
rollouts.jsonl              one line an answer, appended only after the shard that it refers to is on disk
routes-00000.safetensors    one int16 tensor [T, L, K] an answer; layers, start and gaps in the metadata
errors.jsonl                lines of the prompts that could not run, of the latest run only
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..flow.routes import Routes
from .prompts import BadLine
from .resume import check_made_with, locked, recover
from .shards import ERRORS, ROLLOUTS, append_lines, reference, shard_name, write_shard

_SHARD_BYTES, _SHARD_SECONDS = 256 << 20, 30.0


class RunFolder:
    """One output folder, open for one process. `finished` maps each finished line to its digest."""

    def __init__(self, path: Path, made_with: Mapping[str, Any], shard_prompts: int = 64) -> None:
        """Create the folder or take up an interrupted run. Raises RunRefused, OSError."""
        path.mkdir(parents=True, exist_ok=True)
        self.path, self.shard_prompts = path, shard_prompts
        self._lock = locked(path)
        try:
            check_made_with(path, made_with)
            self.finished, self._shard = recover(path)
            (path / ERRORS).write_text("", encoding="utf-8")
            lines = path / ROLLOUTS
            self._end = lines.stat().st_size if lines.exists() else 0
        except BaseException:
            self._lock.close()
            raise
        self._records: list[dict[str, Any]] = []
        self._routes: dict[str, Routes] = {}
        self._oldest, self._prompts, self._bytes = 0.0, 0, 0

    def add(self, line: int, digest: str, answers: Sequence[tuple[Mapping[str, Any], Routes]]) -> None:
        """Take a finished prompt: for each answer its record and its routes. Writes when enough has come."""
        if not self._records:
            self._oldest = time.monotonic()
        for index, (record, routes) in enumerate(answers):
            key = f"{line}.{index}"
            head = {"line": line, "digest": digest, "answer": index, "answers": len(answers)}
            where = reference(routes, shard_name(self._shard), key)
            self._records.append({**head, **record, "routes": where})
            if routes.ids is not None:
                self._routes[key] = routes
                self._bytes += routes.ids.numel() * routes.ids.element_size()
        self._prompts += 1
        self.finished[line] = digest
        late = time.monotonic() - self._oldest > _SHARD_SECONDS
        if self._prompts >= self.shard_prompts or self._bytes >= _SHARD_BYTES or late:
            self.flush()

    def report(self, bad: BadLine) -> None:
        """Add a line to errors.jsonl."""
        record = {"line": bad.line, "id": bad.id, "error": bad.error}
        with (self.path / ERRORS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def flush(self) -> None:
        """Put everything on disk: first the shard, then the lines that refer to it. May be tried again."""
        if self._routes:
            write_shard(self.path / shard_name(self._shard), self._routes)
        if self._records:
            self._end = append_lines(self.path / ROLLOUTS, self._records, self._end)
        self._shard += bool(self._routes)
        self._records, self._routes, self._prompts, self._bytes = [], {}, 0, 0

    def close(self) -> None:
        """Let another process have the folder. Does not write."""
        self._lock.close()
