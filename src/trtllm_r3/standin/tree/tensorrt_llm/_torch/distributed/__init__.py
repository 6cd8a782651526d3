"""Communication between the engine's ranks."""

from .communicator import Distributed

__all__ = ["Distributed"]
