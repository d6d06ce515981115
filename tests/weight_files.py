"""Safetensors files made byte by byte, whole and damaged."""

from __future__ import annotations

import functools
import json
import math
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def write_raw(path: Path, header: bytes | dict, data: bytes = b"", length: int | None = None) -> Path:
    """A file with any header, honest or not; `length` is what the first eight bytes claim."""
    if isinstance(header, dict):
        header = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def tensor(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict:
    """One tensor's description in a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def split_raw(path: Path) -> tuple[dict, bytes]:
    """Header and data of a whole file."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def small_model(path: Path) -> dict[str, torch.Tensor]:
    """Write a small file of five tensors and return them."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"blocks.{index}.weight": torch.randn(6, 10, generator=generator).to(dtype)
        for index, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16))
    }
    tensors["norm.weight"] = torch.randn(10, generator=generator)
    tensors["scale"] = torch.tensor(0.5)
    save_file(tensors, path, metadata={"format": "pt"})
    return tensors


Damage = Callable[[random.Random, dict, bytes, Path], None]


def _truncated(rng: random.Random, header: dict, data: bytes, path: Path) -> None:
    write_raw(path, header, data)
    whole = path.read_bytes()
    path.write_bytes(whole[: rng.randrange(len(whole))])


def _grown(rng: random.Random, header: dict, data: bytes, path: Path) -> None:
    write_raw(path, header, data + rng.randbytes(rng.randint(1, 64)))


def _flipped_structure(rng: random.Random, header: dict, data: bytes, path: Path) -> None:
    """A flipped bit in a byte that carries meaning: the length, a brace, a quote, a key, an offset."""
    raw = json.dumps(header).encode()
    places = [index for index, byte in enumerate(raw) if chr(byte) in '{}[]":']
    place = rng.choice(places)
    write_raw(path, raw[:place] + bytes([raw[place] ^ (1 << rng.randrange(7))]) + raw[place + 1 :], data)


def _flipped_bit(rng: random.Random, header: dict, data: bytes, path: Path) -> None:
    """Any bit of the header, or of its length, is flipped."""
    write_raw(path, header, data)
    raw = bytearray(path.read_bytes())
    raw[rng.randrange(len(raw) - len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(raw)


def _wrong_length(rng: random.Random, header: dict, data: bytes, path: Path) -> None:
    true = len(json.dumps(header).encode())
    claimed = rng.choice([0, 1, true - 1, true + 1, true * 2, 10**9, 2**40, 2**63, 2**64 - 1])
    write_raw(path, header, data, length=claimed)


def _offsets(rng: random.Random, header: dict, data: bytes, path: Path) -> None:
    name = rng.choice([name for name in header if name != "__metadata__"])
    begin, end = header[name]["data_offsets"]
    header[name]["data_offsets"] = rng.choice(
        [
            [-1, end],
            [begin, -end - 1],
            [end + 1, begin],
            [begin + 1, end + 1],
            [begin, end + 2**40],
            [begin, 2**64],
            [float(begin), float(end) + 0.5],
            [begin],
            [begin, end, end],
            [str(begin), str(end)],
            None,
            [True, end],
        ]
    )
    write_raw(path, header, data)


def _overlap(rng: random.Random, header: dict, data: bytes, path: Path) -> None:
    header["blocks.0.weight"]["data_offsets"] = list(header["blocks.0.weight"]["data_offsets"])
    begin, end = header["blocks.0.weight"]["data_offsets"]
    header["another.weight"] = tensor([(end - begin) // 4], begin, end)
    write_raw(path, header, data)


def _duplicate(rng: random.Random, header: dict, data: bytes, path: Path) -> None:
    name = rng.choice([name for name in header if name != "__metadata__"])
    raw = json.dumps(header)
    write_raw(path, (raw[:-1] + f', "{name}": ' + json.dumps(header[name]) + "}").encode(), data)


def _shape(rng: random.Random, header: dict, data: bytes, path: Path) -> None:
    name = rng.choice([name for name in header if name != "__metadata__" and header[name]["shape"]])
    shape = list(header[name]["shape"])
    shape[rng.randrange(len(shape))] = rng.choice(
        [-1, 2**63, 2**31, 2**64, 10**400, 1.5, "6", None, True, [6]]
    )
    header[name]["shape"] = rng.choice([shape, [2**63], [2**32, 2**32], [2**62, 4], 7, None, {"a": 1}])
    write_raw(path, header, data)


def _dtype(rng: random.Random, header: dict, data: bytes, path: Path) -> None:
    name = rng.choice([name for name in header if name != "__metadata__"])
    header[name]["dtype"] = rng.choice(["F33", "", "f32", 4, None, ["F32"], "F" * 10**6])
    write_raw(path, header, data)


def _missing_key(rng: random.Random, header: dict, data: bytes, path: Path) -> None:
    name = rng.choice([name for name in header if name != "__metadata__"])
    del header[name][rng.choice(["dtype", "shape", "data_offsets"])]
    write_raw(path, header, data)


def _not_json(rng: random.Random, header: dict, data: bytes, path: Path) -> None:
    claimed = rng.choice(
        [
            b"{" * 5000,
            b"[" * 300_000,
            b'{"a":' * 40_000 + b"1" + b"}" * 40_000,
            b"[1, 2]",
            b"null",
            b"",
            b'{"a": NaN}',
            b'{"\xff": 1}',
            rng.randbytes(500),
            b"PK\x03\x04" + rng.randbytes(400),
            b'{"a": [' + b"[]," * 2_000_000 + b"[]]}",
            b'{"a": [' + b"1," * 9_000_000 + b"1]}",
            b'{"a": "' + "\U0001f600".encode() * 5_000_000 + b'"}',
            b'{"a": 1' + b"0" * 100_000 + b"}",
            b'{"__metadata__": {"a": 1}}',
            b'{"__metadata__": []}',
        ]
    )
    write_raw(path, claimed, data)


def _renamed(rng: random.Random, header: dict, data: bytes, path: Path) -> None:
    """One letter of a tensor's name is another one; every offset is as it was."""
    name = rng.choice([name for name in header if name != "__metadata__"])
    place = rng.choice([index for index, letter in enumerate(name) if letter.isalpha()])
    letter = rng.choice([one for one in "abcdefghijklmnopqrstuvwxyz_" if one != name[place]])
    renamed = name[:place] + letter + name[place + 1 :]
    write_raw(path, {renamed if key == name else key: value for key, value in header.items()}, data)


def _reshaped(rng: random.Random, header: dict, data: bytes, path: Path) -> None:
    """A tensor has another shape of as many values: the header is honest, the model is not this one."""
    name = rng.choice([name for name, one in header.items() if len(one.get("shape", ())) == 2])
    shape = header[name]["shape"]
    count = math.prod(shape)
    shapes = [[count], [1, count], [count, 1], shape[::-1], [count // 2, 2], [2, count // 2], [*shape, 1]]
    header[name]["shape"] = rng.choice([other for other in shapes if other != shape])
    write_raw(path, header, data)


# What can happen to a file whose header still reads: only the model that it should hold tells.
MODEL_DAMAGES: tuple[Damage, ...] = (_truncated, _flipped_bit, _renamed, _reshaped)

DAMAGES: tuple[Damage, ...] = (
    _truncated,
    _grown,
    _flipped_structure,
    _wrong_length,
    _offsets,
    _overlap,
    _duplicate,
    _shape,
    _dtype,
    _missing_key,
    _not_json,
)


def damaged(seed: int, whole: Path, path: Path, damages: Sequence[Damage] = DAMAGES) -> str:
    """Write a damaged copy of `whole` to `path`; returns the kind of damage."""
    rng = random.Random(seed)
    header, data = split_raw(whole)
    damage = damages[seed % len(damages)]
    damage(rng, header, data, path)
    return damage.__name__.strip("_")


ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    "",
    "x",
    "\ud800",
    "x" * 50_000,
    -1,
    0,
    1,
    2.5,
    10**6,
    10**9,
    10**15,
    10**30,
    1e308,
    [],
    [[]],
    [1] * 20_000,
    {},
    {"a": {"b": [1]}},
    functools.reduce(lambda inner, _: [inner], range(300), []),
)

# Texts that are no settings at all.
ODD_TEXTS = (
    b"",
    b"null",
    b"[]",
    b"{}",
    b"\xff\xfe{",
    b'{"a": NaN}',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"a": [' + b"[]," * 300_000 + b"[]]}",
    b'{"a": [' + b"{}," * 5_000_000 + b"{}]}",
    b'{"a": 1' + b"0" * 100_000 + b"}",
)


def _places(table: dict | list) -> list[tuple[dict | list, Any]]:
    """Every value in a JSON text, as what holds it and its key or index there."""
    found: list[tuple[dict | list, Any]] = []
    for key, value in table.items() if isinstance(table, dict) else enumerate(table):
        found.append((table, key))
        if isinstance(value, dict | list):
            found += _places(value)
    return found


def damaged_json(rng: random.Random, raw: bytes) -> bytes:
    """The JSON object `raw`, damaged: cut, a bit flipped, a value odd, gone or given twice, or another text."""
    kind = rng.choice(("cut", "bit", "text", "twice", "gone", "value", "value", "value", "value"))
    table = json.loads(raw)
    holder, key = rng.choice(_places(table))
    if kind == "cut":
        return raw[: rng.randrange(len(raw))]
    if kind == "bit":
        place = rng.randrange(len(raw))
        return raw[:place] + bytes([raw[place] ^ (1 << rng.randrange(8))]) + raw[place + 1 :]
    if kind == "text":
        return rng.choice(ODD_TEXTS)
    if kind == "twice":
        return raw.rstrip()[:-1] + b", " + raw.strip()[1:]
    if kind == "gone":
        del holder[key]
    else:
        holder[key] = rng.choice(ODD_VALUES)
    return json.dumps(table).encode()
