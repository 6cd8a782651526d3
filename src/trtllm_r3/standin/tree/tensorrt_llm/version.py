"""Version of the engine behind the stock names."""

__version__ = "1.2.0+standin"
