"""The engine in Python alone: works wherever Python does, and says and does what the native one does."""

from redbolt._pure.engine import Engine

__all__ = ["Engine"]
