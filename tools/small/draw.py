"""The data that the small FLUX.2 learns from, and the judge of what it paints.

Everything is drawn here: one shape of one colour on a ground of another, with a caption. Nothing is downloaded.
The judge reads pixels alone: it finds the ground, the shape's colour, and which of the three kinds of shape
covers the painted area best.

Coordinates are fractions of the image's side: x to the right, y downwards. Colours are RGB in 0..1.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

import numpy as np
import torch

SHAPES = ("circle", "square", "triangle")
COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.86, 0.14, 0.16),
    "green": (0.13, 0.64, 0.24),
    "blue": (0.15, 0.28, 0.86),
    "yellow": (0.97, 0.86, 0.16),
    "orange": (0.97, 0.52, 0.10),
    "purple": (0.54, 0.18, 0.70),
    "white": (0.97, 0.97, 0.97),
    "black": (0.05, 0.05, 0.06),
}
# Radius of the circle of the same area, as a fraction of the side.
SIZES: dict[str, tuple[float, float]] = {"small": (0.14, 0.175), "": (0.185, 0.235), "large": (0.245, 0.28)}
MARGIN = 0.03
# How far from the middle the pictures of a caption may have their shape.
NEAR = 0.04
OUTLINE_WIDTH = 0.055
HELD_OUT_TRIPLES = 34
HELD_OUT_SEED = 20261129

# Half extents of each kind for an equal-area radius of one: left and right, up, down.
_SQUARE_HALF = 0.8862
_TRIANGLE_RADIUS = 1.5551
_EXTENTS = {
    "circle": (1.0, 1.0, 1.0),
    "square": (_SQUARE_HALF, _SQUARE_HALF, _SQUARE_HALF),
    "triangle": (_TRIANGLE_RADIUS * 0.8660, _TRIANGLE_RADIUS, _TRIANGLE_RADIUS * 0.5),
}


@dataclass(frozen=True)
class Scene:
    """One picture: what a caption names (shape, colour, ground, size) and what it leaves open (place, radius)."""

    shape: str
    colour: str
    ground: str
    size: str = ""
    x: float = 0.5
    y: float = 0.5
    radius: float = 0.21
    outline: bool = False

    @property
    def triple(self) -> tuple[str, str, str]:
        """(shape, colour, ground): what the judge reads back."""
        return (self.shape, self.colour, self.ground)


def all_triples() -> list[tuple[str, str, str]]:
    """Every (shape, colour, ground) with two different colours: 168 of them."""
    return [(s, c, g) for s, c, g in itertools.product(SHAPES, COLOURS, COLOURS) if c != g]


def split_triples() -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """(training, held out): the held-out triples are never drawn in training, as picture or as edit."""
    triples = all_triples()
    random.Random(HELD_OUT_SEED).shuffle(triples)
    return triples[HELD_OUT_TRIPLES:], triples[:HELD_OUT_TRIPLES]


def place(rng: random.Random, scene: Scene, spread: float = 1.0) -> Scene:
    """The scene with a radius that suits its size word, at a random place where it fits into the frame.

    The centre lies at most ``spread`` from the middle of the picture, both ways; a small spread also keeps the radius
    near the middle of what the size word allows.
    """
    low, high = SIZES[scene.size]
    radius = (low + high) / 2 + min(1.0, 6 * spread) * (rng.uniform(low, high) - (low + high) / 2)
    # Room for all three kinds, so that an edit may change the shape and keep the place.
    side = max(e[0] for e in _EXTENTS.values()) * radius + MARGIN
    up = max(e[1] for e in _EXTENTS.values()) * radius + MARGIN
    down = max(e[2] for e in _EXTENTS.values()) * radius + MARGIN
    x = rng.uniform(max(side, 0.5 - spread), min(1 - side, 0.5 + spread))
    y = rng.uniform(max(up, 0.5 - spread), min(1 - down, 0.5 + spread))
    return replace(scene, radius=radius, x=x, y=y)


CAPTIONS = (
    "a {size}{colour} {shape} on a {ground} background",
    "a {size}{colour} {shape} on a {ground} background",
    "a {size}{colour} {shape} on a {ground} background",
    "{size}{colour} {shape} on {ground}",
    "a picture of a {size}{colour} {shape} on a {ground} background",
    "a {ground} background with a {size}{colour} {shape}",
)


def caption(scene: Scene, rng: random.Random | None = None) -> str:
    """The caption of a scene: the plain form, or one of five phrasings drawn from ``rng``."""
    return caption_in(scene, CAPTIONS[0] if rng is None else rng.choice(CAPTIONS))


def caption_in(scene: Scene, form: str) -> str:
    """The caption of a scene in one of CAPTIONS."""
    size = f"{scene.size} " if scene.size else ""
    text = form.format(size=size, colour=scene.colour, shape=scene.shape, ground=scene.ground)
    return text.replace("a orange", "an orange")


def random_scene(rng: random.Random, triples: list[tuple[str, str, str]], spread: float = NEAR) -> Scene:
    """One of ``triples`` with a size word half of the time, placed within ``spread`` of the middle."""
    shape, colour, ground = rng.choice(triples)
    size = rng.choice(("", "", "small", "large"))
    return place(rng, Scene(shape, colour, ground, size), spread)


_COLOUR_EDITS = ("make it {}", "make it {}", "make the {shape} {}", "change the colour to {}")
_GROUND_EDITS = ("make the background {}", "put it on a {} background")
_SHAPE_EDITS = ("make it a {}", "turn it into a {}")


def _instruction(form: str, word: str, shape: str) -> str:
    return form.format(word, shape=shape).replace("a orange", "an orange")


def all_instructions() -> list[str]:
    """Every text that :func:`random_edit` can give."""
    texts = [_instruction(f, c, s) for f in _COLOUR_EDITS + _GROUND_EDITS for c in COLOURS for s in SHAPES]
    texts += [_instruction(f, s, s) for f in _SHAPE_EDITS for s in SHAPES]
    return list(dict.fromkeys(texts))


def random_edit(rng: random.Random, triples: list[tuple[str, str, str]]) -> tuple[Scene, Scene, str]:
    """(reference, target, instruction): the same place with one thing changed, both ends among ``triples``."""
    allowed = set(triples)
    while True:
        before = random_scene(rng, triples)
        kind = rng.choice(("colour", "colour", "ground", "shape"))
        if kind == "colour":
            word = rng.choice([c for c in COLOURS if c not in (before.colour, before.ground)])
            after = replace(before, colour=word)
            text = rng.choice(_COLOUR_EDITS)
        elif kind == "ground":
            word = rng.choice([c for c in COLOURS if c not in (before.colour, before.ground)])
            after = replace(before, ground=word)
            text = rng.choice(_GROUND_EDITS)
        else:
            word = rng.choice([s for s in SHAPES if s != before.shape])
            after = replace(before, shape=word)
            text = rng.choice(_SHAPE_EDITS)
        if after.triple in allowed:
            return before, after, _instruction(text, word, before.shape)


def held_out_scenes(count: int = 100) -> list[tuple[Scene, str]]:
    """``count`` fixed (scene, caption) of held-out triples, all captions different."""
    rng = random.Random(HELD_OUT_SEED + 1)
    held = split_triples()[1]
    chosen: dict[str, Scene] = {}
    for index in itertools.count():
        if len(chosen) == count:
            return [(scene, text) for text, scene in chosen.items()]
        shape, colour, ground = held[index % len(held)]
        scene = Scene(shape, colour, ground, rng.choice(tuple(SIZES)))
        chosen.setdefault(caption(scene, rng if rng.random() < 0.5 else None), scene)
    raise AssertionError("unreachable")


def held_out_edits(count: int = 50) -> list[tuple[Scene, Scene, str]]:
    """``count`` fixed edits whose result is a held-out triple (the reference may be any picture)."""
    rng = random.Random(HELD_OUT_SEED + 2)
    held = set(split_triples()[1])
    edits: list[tuple[Scene, Scene, str]] = []
    while len(edits) < count:
        before, after, text = random_edit(rng, all_triples())
        if after.triple in held and before.triple not in held:
            edits.append((before, after, text))
    return edits


def draw(scenes: list[Scene], side: int = 64) -> torch.Tensor:
    """Pictures of ``scenes``: float32 [n, 3, side, side] in 0..1, edges smoothed over one pixel.

    The outline of a shape is a band of OUTLINE_WIDTH inside its edge; within it the ground shows.
    """
    centres = (torch.arange(side, dtype=torch.float32) + 0.5) / side
    x = torch.tensor([s.x for s in scenes]).view(-1, 1, 1)
    y = torch.tensor([s.y for s in scenes]).view(-1, 1, 1)
    radius = torch.tensor([s.radius for s in scenes]).view(-1, 1, 1)
    dx = centres.view(1, 1, -1) - x
    dy = centres.view(1, -1, 1) - y
    # Signed distance to the edge, negative inside, for each kind of shape.
    circle = (dx.square() + dy.square()).sqrt() - radius
    square = torch.maximum(dx.abs(), dy.abs()) - _SQUARE_HALF * radius
    inner = 0.5 * _TRIANGLE_RADIUS * radius
    triangle = torch.maximum(dy - inner, 0.8660254 * dx.abs() - 0.5 * dy - inner)
    kinds = torch.stack([circle, square.expand_as(circle), triangle.expand_as(circle)])
    which = torch.tensor([SHAPES.index(s.shape) for s in scenes])
    distance = kinds[which, torch.arange(len(scenes))]
    outline = torch.tensor([s.outline for s in scenes]).view(-1, 1, 1)
    half = OUTLINE_WIDTH / 2
    distance = torch.where(outline, (distance + half).abs() - half, distance)
    cover = (0.5 - distance * side).clamp(0, 1).unsqueeze(1)
    colour = torch.tensor([COLOURS[s.colour] for s in scenes]).view(-1, 3, 1, 1)
    ground = torch.tensor([COLOURS[s.ground] for s in scenes]).view(-1, 3, 1, 1)
    return ground + cover * (colour - ground)


@dataclass(frozen=True)
class Verdict:
    """What the judge sees. ``shape``, ``colour`` and ``ground`` are None where nothing clear is there."""

    shape: str | None
    colour: str | None
    ground: str | None
    overlap: float = 0.0
    hollow: float = 0.0

    @property
    def triple(self) -> tuple[str | None, str | None, str | None]:
        return (self.shape, self.colour, self.ground)


def _nearest_colour(rgb: np.ndarray, limit: float = 0.22) -> str | None:
    names = list(COLOURS)
    distances = np.linalg.norm(np.array([COLOURS[n] for n in names]) - rgb, axis=1)
    best = int(distances.argmin())
    return names[best] if distances[best] <= limit else None


def _enclosed(mask: np.ndarray) -> np.ndarray:
    """The mask with its inside filled: pixels that have the mask on their left, right, above and below."""
    left = np.maximum.accumulate(mask, axis=1)
    right = np.maximum.accumulate(mask[:, ::-1], axis=1)[:, ::-1]
    above = np.maximum.accumulate(mask, axis=0)
    below = np.maximum.accumulate(mask[::-1], axis=0)[::-1]
    return left & right & above & below


def judge(image: np.ndarray) -> Verdict:
    """Read ground, colour and shape from the pixels of one picture.

    Args:
        image: [height, width, 3], floats in 0..1 or bytes.

    Returns:
        The verdict. Ground = the palette colour nearest to the median of the border; the painted area = pixels
        nearer to the shape's colour than to the ground; shape = the kind of the same area and centre with the best
        intersection over union, at least 0.8. ``hollow`` is the share of the shape's inside that shows the ground
        (about 0 for a filled shape, 0.3 and more for an outline).
    """
    pixels = np.asarray(image, dtype=np.float32)
    if np.asarray(image).dtype == np.uint8:
        pixels = pixels / 255.0
    height, width, _ = pixels.shape
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    ground_rgb = np.median(border, axis=0)
    ground = _nearest_colour(ground_rgb)
    contrast = np.linalg.norm(pixels - ground_rgb, axis=2)
    strong = contrast > max(0.6 * float(np.quantile(contrast, 0.995)), 0.15)
    if not strong.any():
        return Verdict(None, None, ground)
    colour_rgb = np.median(pixels[strong], axis=0)
    colour = _nearest_colour(colour_rgb)
    painted = np.linalg.norm(pixels - colour_rgb, axis=2) < contrast
    filled = _enclosed(painted)
    area = int(filled.sum())
    if not 0.02 * height * width <= area <= 0.6 * height * width:
        return Verdict(None, colour, ground)
    rows, columns = np.nonzero(filled)
    y, x = (rows.mean() + 0.5) / height, (columns.mean() + 0.5) / width
    radius = float(np.sqrt(area / (np.pi * height * width)))
    overlaps = {}
    for shape in SHAPES:
        scene = Scene(shape, "white", "black", x=float(x), y=float(y), radius=radius)
        model = draw([scene], max(height, width))[0, 0, :height, :width].numpy() > 0.5
        overlaps[shape] = float((model & filled).sum() / (model | filled).sum())
    best = max(overlaps, key=overlaps.__getitem__)
    hollow = float(1 - (painted & filled).sum() / area)
    return Verdict(best if overlaps[best] >= 0.8 else None, colour, ground, overlaps[best], hollow)


def to_pixels(images: torch.Tensor) -> np.ndarray:
    """[n, 3, height, width] in 0..1 to bytes [n, height, width, 3]."""
    return (images.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
