"""What the worker adds to a response that cannot carry it itself. Imported from `result`."""

from __future__ import annotations

from typing import Any

from .completion import LogProbsResult


class ResponseWrapper:
    """A response with log-probabilities and times beside it. Only these three travel to another process."""

    def __init__(
        self,
        response: Any,
        logprobs: LogProbsResult | None = None,
        request_perf_metrics: dict[str, float] | None = None,
    ) -> None:
        self._response = response
        self.logprobs = logprobs
        self.request_perf_metrics = request_perf_metrics

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_response"), name)

    def __getstate__(self) -> tuple[Any, LogProbsResult | None, dict[str, float] | None]:
        return self._response, self.logprobs, self.request_perf_metrics

    def __setstate__(self, state: tuple[Any, LogProbsResult | None, dict[str, float] | None]) -> None:
        self._response, self.logprobs, self.request_perf_metrics = state


def wrap_with_times(response: Any) -> Any:
    """The response, wrapped if it carries the times of its request."""
    result = response.result
    fields = result.get_result() if hasattr(result, "get_result") else result
    metrics = getattr(fields, "request_perf_metrics", None)
    if metrics is None:
        return response
    names = ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time")
    times = {name: float(getattr(metrics.timing_metrics, name)) for name in names}
    return ResponseWrapper(response, request_perf_metrics=times)


def durations(times: dict[str, float], num_tokens: int, several: bool) -> dict[str, float]:
    """Seconds to the first token (ttft), to the end (e2e), in the queue, and per further token (tpot)."""
    arrival, first = times["arrival_time"], times["first_token_time"]
    found = {
        "ttft": first - arrival,
        "e2e": times["last_token_time"] - arrival,
        "request_queue_time": times["first_scheduled_time"] - arrival,
    }
    if num_tokens > 1 and not several:
        found["tpot"] = (times["last_token_time"] - first) / (num_tokens - 1)
    return {name: seconds for name, seconds in found.items() if seconds > 0}
