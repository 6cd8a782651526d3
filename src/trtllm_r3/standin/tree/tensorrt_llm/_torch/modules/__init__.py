"""Layers of the models."""
