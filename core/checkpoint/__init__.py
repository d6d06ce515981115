"""Weight files: their headers, how their tensors map to a model's parameters, reading shards, writing."""

from .files import Checkpoint, resolve_source
from .header import Header, TensorEntry, read_header
from .layout import IDENTITY, FileLayout, Piece, Rows, Rule, Target, Wanted, check, choose_layout
from .reader import ReadReport, read_shards

__all__ = [
    "IDENTITY",
    "Checkpoint",
    "FileLayout",
    "Header",
    "Piece",
    "ReadReport",
    "Rows",
    "Rule",
    "Target",
    "TensorEntry",
    "Wanted",
    "check",
    "choose_layout",
    "read_header",
    "read_shards",
    "resolve_source",
]
