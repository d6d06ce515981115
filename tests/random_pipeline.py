"""A FLUX.2 pipeline of random weights in the real layout, for tests of every loader."""

from comfy_tp.core.small.random_weights import save_pipeline

__all__ = ["save_pipeline"]
