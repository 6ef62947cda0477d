"""The tiny models of the components' tests."""

from tests.components.conftest import other_tied_model, other_untied_model, tied_model, untied_model

__all__ = ["other_tied_model", "other_untied_model", "tied_model", "untied_model"]
