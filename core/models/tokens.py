"""Latent grids as token sequences with position ids, as FLUX models read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..errors import UnsupportedError

REFERENCE_METHODS = ("index", "offset", "uxo")


def flatten_latent(x: torch.Tensor) -> torch.Tensor:
    """[B, C, h, w] -> [B, h*w, C], row by row."""
    return x.flatten(2).transpose(1, 2)


def unflatten_latent(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """[B, h*w, C] -> [B, C, h, w], contiguous; inverse of `flatten_latent`."""
    return tokens.transpose(1, 2).unflatten(2, (height, width)).contiguous()


def image_ids(
    height: int, width: int, device: torch.device | str, *, index: float = 0, top: int = 0, left: int = 0
) -> torch.Tensor:
    """Position ids [h*w, 4] float32 of a grid: (index, top + row, left + column, 0)."""
    ids = torch.zeros(height, width, 4, dtype=torch.float32, device=device)
    ids[..., 0] = index
    ids[..., 1] = torch.arange(top, top + height, dtype=torch.float32, device=device).unsqueeze(1)
    ids[..., 2] = torch.arange(left, left + width, dtype=torch.float32, device=device).unsqueeze(0)
    return ids.flatten(0, 1)


def text_ids(length: int, device: torch.device | str) -> torch.Tensor:
    """Position ids [L, 4] float32 of text tokens: (0, 0, 0, l)."""
    ids = torch.zeros(length, 4, dtype=torch.float32, device=device)
    ids[:, 3] = torch.arange(length, dtype=torch.float32, device=device)
    return ids


def reference_tokens(
    references: Sequence[torch.Tensor], method: str, height: int, width: int, scale: float
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each reference latent [B, C, h, w] with its position ids [h*w, 4], placed by ComfyUI's reference `method`.

    "index": axis 0 counts the references in steps of `scale`. "uxo": diagonally after the image. "offset": axis 0 is
    1 and the references are packed side by side, growing the shorter side first.
    """
    if references and method not in REFERENCE_METHODS:
        raise UnsupportedError(
            f"Unknown reference method '{method}' (reference_latents_method). The ranks implement: "
            f"{', '.join(REFERENCE_METHODS)}."
        )
    bottom = right = 0
    for number, reference in enumerate(references, start=1):
        rows, columns = reference.shape[-2:]
        top = left = 0
        index = scale * number
        if method == "uxo":
            index = 0
            top, left = height + bottom, width + right
            bottom, right = bottom + rows, right + columns
        elif method == "offset":
            index = 1
            if rows + bottom > columns + right:
                left = right
            else:
                top = bottom
            bottom, right = max(bottom, rows + top), max(right, columns + left)
        yield reference, image_ids(rows, columns, reference.device, index=index, top=top, left=left)
