"""Weights from the policy's ranks to the engines."""
