"""What stock binds from C++, as plain Python."""

from .._utils import steady_clock_now
from . import executor

__all__ = ["executor", "steady_clock_now"]
