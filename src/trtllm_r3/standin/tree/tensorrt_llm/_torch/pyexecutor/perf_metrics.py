"""Times and cache use of one request."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..._utils import steady_clock_now


@dataclass
class TimingMetrics:
    """Seconds on the steady clock; 0 where it did not happen."""

    arrival_time: float = 0.0
    first_scheduled_time: float = 0.0
    first_token_time: float = 0.0
    last_token_time: float = 0.0


@dataclass
class KvCacheMetrics:
    """Blocks of the prompt that were found in the cache, and that were not."""

    num_reused_blocks: int = 0
    num_missed_blocks: int = 0


@dataclass
class RequestPerfMetrics:
    """Metrics of a request, sent with its last response if it asked (`return_perf_metrics`)."""

    timing_metrics: TimingMetrics = field(default_factory=TimingMetrics)
    kv_cache_metrics: KvCacheMetrics = field(default_factory=KvCacheMetrics)
    first_iter: int | None = None
    last_iter: int | None = None

    def scheduled(self) -> None:
        """It takes part in its first step."""
        if not self.timing_metrics.first_scheduled_time:
            self.timing_metrics.first_scheduled_time = steady_clock_now()

    def token_added(self, iteration: int, finished: bool) -> None:
        """A step of it was answered."""
        now = steady_clock_now()
        if self.first_iter is None:
            self.first_iter, self.timing_metrics.first_token_time = iteration, now
        if finished:
            self.last_iter, self.timing_metrics.last_token_time = iteration, now
