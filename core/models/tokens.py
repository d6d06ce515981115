"""Latent grids as token sequences with position ids, as FLUX models read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..errors import InputError, UnsupportedError

REFERENCE_METHODS = ("index", "offset", "uxo")


def flatten_latent(x: torch.Tensor, patch: int = 1) -> torch.Tensor:
    """[B, C, h, w] -> [B, h/p * w/p, C*p*p]: one token per `patch` x `patch` square, row by row.

    A token holds its square channel by channel. Where `patch` does not divide h or w, the rows and columns that lack
    are taken from the opposite edge, as ComfyUI pads.
    """
    if patch > 1:
        height, width = x.shape[-2:]
        lacking = (0, -width % patch, 0, -height % patch)
        x = F.pad(x, lacking, mode="circular") if any(lacking) else x
        x = F.pixel_unshuffle(x, patch)
    return x.flatten(2).transpose(1, 2)


def unflatten_latent(tokens: torch.Tensor, height: int, width: int, patch: int = 1) -> torch.Tensor:
    """[B, S, C*p*p] -> [B, C, h, w], contiguous, without the padding; inverse of `flatten_latent`.

    The first h/p * w/p of the S tokens are the grid's; what follows, such as references, is left out.
    """
    rows, columns = patches(height, patch), patches(width, patch)
    grid = tokens[:, : rows * columns].transpose(1, 2).unflatten(2, (rows, columns))
    if patch > 1:
        grid = F.pixel_shuffle(grid, patch)[..., :height, :width]
    return grid.contiguous()


def patches(length: int, patch: int) -> int:
    """How many patches cover `length` latent positions."""
    return -(-length // patch)


@dataclass(frozen=True)
class Offset:
    """Where a grid of tokens lies: its first position axis, and the row and column of its first token."""

    index: float = 0
    top: int = 0
    left: int = 0


def image_ids(height: int, width: int, device: torch.device | str, offset: Offset = Offset()) -> torch.Tensor:
    """Position ids [h*w, 4] float32 of a grid of tokens: (index, top + row, left + column, 0)."""
    ids = torch.zeros(height, width, 4, dtype=torch.float32, device=device)
    rows = torch.arange(offset.top, offset.top + height, dtype=torch.float32, device=device)
    columns = torch.arange(offset.left, offset.left + width, dtype=torch.float32, device=device)
    ids[..., 0] = offset.index
    ids[..., 1] = rows.unsqueeze(1)
    ids[..., 2] = columns.unsqueeze(0)
    return ids.flatten(0, 1)


def text_ids(length: int, device: torch.device | str) -> torch.Tensor:
    """Position ids [L, 4] float32 of text tokens: (0, 0, 0, l)."""
    ids = torch.zeros(length, 4, dtype=torch.float32, device=device)
    ids[:, 3] = torch.arange(length, dtype=torch.float32, device=device)
    return ids


def placed_latents(
    x: torch.Tensor, references: Sequence[torch.Tensor], method: str, scale: float, patch: int = 1
) -> Iterator[tuple[torch.Tensor, Offset]]:
    """The latent `x` [B, C, h, w] and then the references [1 or B, C, h_k, w_k], each as [B, C, ...] in x's dtype,
    with the places of their tokens by ComfyUI's reference `method`.

    "index": axis 0 counts the references in steps of `scale`. "uxo": diagonally after the image. "offset": axis 0 is
    1 and the references are packed side by side, growing the shorter side first. They are packed as latents, before
    they are cut into patches. Raises `InputError` for a latent of a video, or a reference of another model's VAE.
    """
    if x.ndim != 4:
        raise InputError(
            f"The latent has the shape {list(x.shape)}, but this model takes [batch, channels, height, width]: it belongs "
            f"to another model. Use the empty latent node or the VAE that was made for this one."
        )
    for number, reference in enumerate(references, start=1):
        if reference.ndim != 4 or reference.shape[1] != x.shape[1]:
            raise InputError(
                f"Reference latent {number} has the shape {list(reference.shape)}, but this model takes {x.shape[1]} channels "
                f"as [batch, channels, height, width]. Encode the picture with the VAE that was made for the model."
            )
    if references and method not in REFERENCE_METHODS:
        raise UnsupportedError(
            f"Unknown reference method '{method}' (reference_latents_method). The ranks implement: "
            f"{', '.join(REFERENCE_METHODS)}."
        )
    yield x, Offset()
    height, width = (patches(length, patch) * patch for length in x.shape[-2:])
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
        offset = Offset(index, (top + patch // 2) // patch, (left + patch // 2) // patch)
        yield reference.to(x.dtype).expand(x.shape[0], *[-1] * (reference.ndim - 1)), offset


def grid_tokens(
    x: torch.Tensor, references: Sequence[torch.Tensor], method: str, scale: float, patch: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """The latent and its references (`placed_latents`) as one sequence: tokens [B, S, C*p*p] and ids [S, 4]."""
    tokens, ids = [], []
    for latent, offset in placed_latents(x, references, method, scale, patch):
        rows, columns = (patches(length, patch) for length in latent.shape[-2:])
        tokens.append(flatten_latent(latent, patch))
        ids.append(image_ids(rows, columns, x.device, offset))
    return torch.cat(tokens, dim=1), torch.cat(ids)
