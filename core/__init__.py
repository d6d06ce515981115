"""Sharding of diffusion transformers over ranks; knows nothing of ComfyUI."""
