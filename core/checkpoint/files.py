"""`Checkpoint`: the weight files of one model, as one table of tensors. Only headers are read here."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..wording import quote, short
from .header import Header, TensorEntry, read_header
from .strict_json import read_object

SAFETENSORS_SUFFIXES = (".safetensors", ".sft")
OTHER_WEIGHT_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".msgpack", ".h5", ".onnx", ".pkl")
# Names that diffusers and transformers give their weights, in the order in which they are looked for.
STEMS = ("diffusion_pytorch_model", "model")
INDEX_LIMIT = 16_000_000
CONFIG_LIMIT = 1_000_000
# One owner and one name, each of letters, digits, '.', '_' and '-': how the hub spells a repository.
REPOSITORY_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")

# What `save_shards` calls the file of a rank: its number and the degree.
RANK_FILE = re.compile(r"rank-(\d{5})-of-(\d{5})\.safetensors")


def is_safetensors(name: str) -> bool:
    """Whether a file of that name holds safetensors; ComfyUI lists names in capitals too."""
    return name.lower().endswith(SAFETENSORS_SUFFIXES)


@dataclass(frozen=True)
class Checkpoint:
    """All tensors of a model's safetensors files, from their headers.

    `path` is what was opened (a file or the component's folder), `entries` maps tensor name to entry,
    `metadata` is the files' own string table, `config` the `config.json` beside them (None where there is none).
    """

    path: str
    entries: dict[str, TensorEntry]
    metadata: dict[str, str]
    config: dict[str, Any] | None
    headers: tuple[Header, ...]

    @classmethod
    def open(
        cls, path: str | os.PathLike, subfolder: str | None = None, *, variant: str | None = None
    ) -> Checkpoint:
        """Read the headers of a .safetensors file, or of the weights in a component's folder.

        `subfolder` names a component of a pipeline folder. `variant` ("fp16") picks among several versions.
        Raises `CheckpointError` for files that are missing, damaged, contradictory, or of another format.
        """
        location = Path(path).expanduser()
        if subfolder:
            location = inside(location, subfolder)
        files = locate_weights(location, variant)
        headers = tuple(read_header(file) for file in files.paths)
        entries: dict[str, TensorEntry] = {}
        metadata: dict[str, str] = {}
        for header in headers:
            for name, entry in header.entries.items():
                if name in entries:
                    raise CheckpointError(
                        f"Tensor '{short(name)}' lies in two files, {entries[name].path} and {header.path}. Remove the file "
                        f"that does not belong to the model, or download the model again."
                    )
                entries[name] = entry
            metadata.update(header.metadata)
        for name, file in (files.weight_map or {}).items():
            entry_or_none = entries.get(name)
            if entry_or_none is None or entry_or_none.path != file:
                raise CheckpointError(
                    f"{files.index}: tensor '{short(name)}' should lie in {file}, but that file does not have it. The index "
                    f"and the files are of different versions; download them again."
                )
        config = _read_config(location) if location.is_dir() else _config_beside(location)
        return cls(os.fspath(location), entries, metadata, config, headers)

    @property
    def files(self) -> tuple[str, ...]:
        """The weight files, absolute."""
        return tuple(header.path for header in self.headers)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())


@dataclass(frozen=True)
class WeightFiles:
    """The files that make up a model, and for several files the index that names them."""

    paths: tuple[str, ...]
    index: str | None = None
    weight_map: dict[str, str] | None = None


def locate_weights(location: Path, variant: str | None = None) -> WeightFiles:
    """The safetensors files at `location`, without reading them.

    Raises `CheckpointError` when there are none, when only other formats are there (R16), or when a file that
    the index names is missing or lies elsewhere.
    """
    location = Path(os.path.abspath(location))
    if location.is_file():
        if location.name.endswith(".index.json"):
            return _indexed(location)
        _require_safetensors(location)
        _refuse_rank_file(location.parent, location.name)
        return WeightFiles((os.fspath(location),))
    if not location.is_dir():
        raise CheckpointError(
            f"No such model: {location}. Give a .safetensors file, a model folder or a hub repository."
        )
    for stem in STEMS:
        single, index = _names(stem, variant)
        for name in index:
            if (location / name).is_file():
                return _indexed(location / name)
        if (location / single).is_file():
            return WeightFiles((os.fspath(location / single),))
    if variant is not None:
        raise CheckpointError(
            f"{location} has no weights of variant '{variant}' ({_names(STEMS[0], variant)[0]}). It has: "
            f"{_listing(location)}."
        )
    return _only_candidate(location)


def identities(location: Path) -> dict[str, list[int]]:
    """Where the weight files at `location` lie when links are followed, each with its device and inode."""
    found = {}
    for path in locate_weights(location).paths:
        real = os.path.realpath(path)
        status = os.stat(real)
        found[real] = [status.st_dev, status.st_ino]
    return found


def check_identities(checkpoint: Checkpoint, expected: dict[str, list[int]]) -> None:
    """Raise `CheckpointError` unless the files that were opened are those of which `identities` spoke."""
    for header in checkpoint.headers:
        if expected.get(header.real) != [header.device, header.inode]:
            raise CheckpointError(
                f"{header.path}: the file that was chosen is not the one that the ranks opened ({header.real}): it or a "
                f"link to it was replaced meanwhile. Queue the prompt again."
            )


def _names(stem: str, variant: str | None) -> tuple[str, tuple[str, ...]]:
    if variant is None:
        return f"{stem}.safetensors", (f"{stem}.safetensors.index.json",)
    return (
        f"{stem}.{variant}.safetensors",
        (f"{stem}.safetensors.index.{variant}.json", f"{stem}.{variant}.safetensors.index.json"),
    )


def _only_candidate(folder: Path) -> WeightFiles:
    """Weights under other names (a variant, or a file's own name) if there is exactly one set of them."""
    names = sorted(name for name in os.listdir(folder) if (folder / name).is_file())
    indexes = [name for name in names if re.search(r"\.safetensors\.index(\.[\w-]+)?\.json$", name)]
    singles = [name for name in names if is_safetensors(name) and not re.search(r"-\d+-of-\d+\b", name)]
    if len(indexes) + len(singles) > 1:
        raise CheckpointError(
            f"{folder} holds several sets of weights: {', '.join(indexes + singles)}. Leave one of them in "
            f"the folder, give the file itself, or from Python choose one with variant=."
        )
    if indexes:
        return _indexed(folder / indexes[0])
    if singles:
        return WeightFiles((os.fspath(folder / singles[0]),))
    shards = [name for name in names if is_safetensors(name)]
    if shards:
        _refuse_rank_file(folder, shards[0])
        raise CheckpointError(
            f"{folder} holds {shards[0]} but no *.safetensors.index.json that names all parts. Download the index file."
        )
    if (folder / "model_index.json").is_file():
        parts = sorted(name for name in os.listdir(folder) if (folder / name).is_dir())
        raise CheckpointError(
            f"{folder} is a pipeline folder, not a model. Name the component with subfolder=, for example "
            f"subfolder='transformer'; it has: {', '.join(parts) or 'nothing'}."
        )
    others = [name for name in names if name.lower().endswith(OTHER_WEIGHT_SUFFIXES)]
    if others:
        _require_safetensors(folder / others[0])
    raise CheckpointError(f"{folder} holds no safetensors weights. It has: {_listing(folder)}.")


def _refuse_rank_file(folder: Path, name: str) -> None:
    found = RANK_FILE.fullmatch(name)
    if found is not None:
        degree = int(found[2])
        raise CheckpointError(
            f"{folder} holds the shards of {degree} ranks that save_shards wrote ({name}), not a whole model. They are "
            f"for comfy_tp.core.from_pretrained with TensorParallelConfig(tp_degree={degree}); here, choose the file or "
            f"folder that the model was first loaded from."
        )


def _require_safetensors(path: Path) -> None:
    """R16: shards are read by byte range, so other formats are refused by name."""
    if is_safetensors(path.name):
        return
    if path.name.lower().endswith(".gguf"):
        advice = "GGUF weights are not supported yet; use the bf16 or fp8 .safetensors file of the model"
    else:
        advice = (
            "Only safetensors weights can be read in shards; use the model's .safetensors files, or convert them with "
            "save_pretrained(safe_serialization=True)"
        )
    raise CheckpointError(f"{path.parent / short(path.name)} is not a safetensors file. {advice}.")


def _indexed(index: Path) -> WeightFiles:
    weight_map = read_object(index, INDEX_LIMIT).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index} has no 'weight_map' that says where the tensors lie. Download it again."
        )
    for name, file in weight_map.items():
        if (
            not isinstance(file, str)
            or file in ("", ".", "..")
            or os.path.basename(file) != file
            or "\\" in file
        ):
            raise CheckpointError(
                f"{index}: tensor '{short(name)}' is said to lie in {quote(file)}, which is outside the model's "
                f"folder. An index may only name files beside it; do not use this model unless you trust its source."
            )
    files = sorted(set(weight_map.values()))
    for file in files:
        _require_safetensors(index.parent / file)
    missing = [file for file in files if not os.path.isfile(index.parent / file)]
    if missing:
        raise CheckpointError(
            f"{index.parent}: {len(missing)} of {len(files)} weight files are missing: "
            f"{', '.join(map(short, missing[:5]))}{', ...' if len(missing) > 5 else ''}. Download them again."
        )
    paths = {file: os.fspath(index.parent / file) for file in files}
    located = {name: paths[file] for name, file in weight_map.items()}
    return WeightFiles(tuple(paths.values()), os.fspath(index), located)


def _read_config(folder: Path) -> dict[str, Any] | None:
    path = folder / "config.json"
    return read_object(path, CONFIG_LIMIT) if path.is_file() else None


def _config_beside(file: Path) -> dict[str, Any] | None:
    """The config.json in the folder of a weight file: it may be anything, another program's too."""
    try:
        return _read_config(file.parent)
    except CheckpointError:
        return None


def inside(folder: Path, subfolder: str) -> Path:
    """The folder `subfolder` in `folder`. Raises `CheckpointError` when it leads out of it or is not there."""
    parts = Path(subfolder).parts
    if Path(subfolder).is_absolute() or ".." in parts:
        raise CheckpointError(
            f"subfolder '{subfolder}' leads out of {folder}. Give the name of a folder inside it."
        )
    inside = folder / subfolder
    if folder.is_dir() and not inside.exists():
        parts_there = sorted(name for name in os.listdir(folder) if (folder / name).is_dir())
        raise CheckpointError(
            f"{folder} has no subfolder '{subfolder}'. It has: {', '.join(parts_there) or 'none'}."
        )
    return inside


def _listing(folder: Path) -> str:
    names = sorted(os.listdir(folder))
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "nothing"


def resolve_source(
    name_or_path: str | os.PathLike,
    *,
    subfolder: str | None = None,
    revision: str | None = None,
    cache_dir: str | os.PathLike | None = None,
    local_files_only: bool = False,
    variant: str | None = None,
    token: str | bool | None = None,
) -> Path:
    """The local file or component folder that `name_or_path` means, with its weights complete.

    A local path comes first, then the hub's local cache, then a download (never with `local_files_only` or
    `HF_HUB_OFFLINE=1`). Raises `CheckpointError` that says what was looked for and how to get it.
    """
    name = os.fspath(name_or_path)
    local = Path(name).expanduser()
    if local.exists():
        location = inside(local, subfolder) if subfolder else local
        locate_weights(location, variant)
        return location
    if (
        not REPOSITORY_ID.match(name)
        or ".." in name
        or name.lower().endswith(SAFETENSORS_SUFFIXES + OTHER_WEIGHT_SUFFIXES)
    ):
        raise CheckpointError(
            f"No such model: '{name}' is neither a file or folder here nor the id of a hub repository (owner/name)."
        )
    if subfolder and (Path(subfolder).is_absolute() or ".." in Path(subfolder).parts):
        raise CheckpointError(f"subfolder '{subfolder}' leads out of the repository. Give a folder's name.")
    return _from_hub(name, subfolder, revision, cache_dir, local_files_only, variant, token)


def _from_hub(
    repository: str,
    subfolder: str | None,
    revision: str | None,
    cache_dir: str | os.PathLike | None,
    local_files_only: bool,
    variant: str | None,
    token: str | bool | None,
) -> Path:
    from huggingface_hub import constants, snapshot_download

    where = f"{subfolder}/" if subfolder else ""
    patterns = [f"{where}*.json", f"{where}*.safetensors"]
    looked_for = f"'{repository}'" + (f", folder '{subfolder}'" if subfolder else "")
    looked_for += f", revision '{revision}'" if revision else ""
    cache = os.fspath(cache_dir) if cache_dir is not None else constants.HF_HUB_CACHE

    def snapshot(local_only: bool) -> Path:
        folder = snapshot_download(
            repository,
            revision=revision,
            cache_dir=cache,
            local_files_only=local_only,
            allow_patterns=patterns,
            token=token,
        )
        location = Path(folder) / subfolder if subfolder else Path(folder)
        locate_weights(location, variant)
        return location

    try:
        return snapshot(True)
    except (OSError, ValueError) as error:
        in_cache = error
    command = f'hf download {repository} --include "{where}*"' + (
        f" --revision {revision}" if revision else ""
    )
    if local_files_only or constants.HF_HUB_OFFLINE:
        found = f" ({in_cache})" if isinstance(in_cache, CheckpointError) else ""
        raise CheckpointError(
            f"{looked_for} is not complete in the local hub cache {cache}{found}, and downloading is switched off. "
            f"Get it with: {command}"
        ) from None
    try:
        return snapshot(False)
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{looked_for} is not in the local hub cache {cache} and could not be downloaded ({reason}). Check the "
            f"name and your network, accept the model's licence on its page if it is gated, or get it with: {command}"
        ) from None
