"""A third-party plug-in for the tests of this folder."""

from tests.their_plugin import their_plugin

__all__ = ["their_plugin"]
