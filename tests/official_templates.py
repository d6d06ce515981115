"""ComfyUI's own templates of FLUX.2, FLUX.1 and Qwen-Image, and the same with our loader in the place of theirs."""

from __future__ import annotations

import functools
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from template_prompts import NOTES
from wheels import wheel

PROJECT = "comfyui-workflow-templates-json"
# The one that the newest supported ComfyUI asks for, and a newer one. Both move forward by a commit.
VERSIONS = ("0.1.50", "0.1.123")
FAMILIES = {
    "FLUX.2": re.compile(r"flux2_dev|flux-2-klein"),
    "FLUX.1": re.compile(r"flux1-|flux\.1-"),
    "Qwen-Image": re.compile(r"qwen_image_(?!2\.1)"),
}
LOADERS = {"UNETLoader": "unet_name", "CheckpointLoaderSimple": "ckpt_name"}
DTYPES = {"fp8_e4m3fn": "float8_e4m3fn", "fp8_e4m3fn_fast": "float8_e4m3fn"}


@dataclass(frozen=True)
class Template:
    """One template; `versions` are the wheels that hold it just so."""

    name: str
    versions: tuple[str, ...]
    families: tuple[str, ...]
    workflow: Mapping[str, Any]

    @property
    def label(self) -> str:
        """Its name, with the wheel where the wheels differ."""
        return self.name if len(self.versions) == len(VERSIONS) else f"{self.name}@{'+'.join(self.versions)}"


@functools.cache
def templates() -> tuple[Template, ...]:
    """Every official template that loads a model of ours, each content once."""
    found: dict[tuple[str, str], Template] = {}
    for version in VERSIONS:
        for name, text in _texts(version):
            workflow = json.loads(text)
            families = families_of(workflow)
            if families:
                key = name, json.dumps(_graph(workflow))
                before = found.get(key)
                versions = (*before.versions, version) if before else (version,)
                found[key] = Template(name, versions, families, workflow)
    return tuple(sorted(found.values(), key=lambda one: (one.name, one.versions)))


def _texts(version: str) -> Iterator[tuple[str, str]]:
    with zipfile.ZipFile(wheel(PROJECT, version)) as archive:
        for member in sorted(archive.namelist()):
            _, slash, name = member.rpartition("/templates/")
            if slash and name.endswith(".json") and not name.startswith("index"):
                text = archive.read(member).decode()
                if any(loader in text for loader in LOADERS):
                    yield name.removesuffix(".json"), text


def _graph(workflow: Mapping[str, Any]) -> Any:
    """What of a workflow is queued: no places, no notes."""
    shown = ("id", "type", "mode", "inputs", "outputs", "widgets_values")
    nodes = [[node.get(key) for key in shown] for node in all_nodes(workflow) if node["type"] not in NOTES]
    subgraphs = workflow.get("definitions", {}).get("subgraphs", ())
    return nodes, [graph["links"] for graph in (workflow, *subgraphs)]


def families_of(workflow: Mapping[str, Any]) -> tuple[str, ...]:
    """The families of the models that a workflow's loaders name, those inside of subgraphs too."""
    files = [
        str(node["widgets_values"][0])
        for node in all_nodes(workflow)
        if node["type"] in LOADERS and node.get("widgets_values")
    ]
    return tuple(name for name in FAMILIES if any(family_of(file) == name for file in files))


def family_of(file: str) -> str | None:
    """The family of a model file, None for one that is not ours."""
    return next((name for name, pattern in FAMILIES.items() if pattern.match(file.lower())), None)


def all_nodes(workflow: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every node of a workflow and of its subgraphs' definitions."""
    yield from workflow.get("nodes", ())
    for graph in workflow.get("definitions", {}).get("subgraphs", ()):
        yield from graph["nodes"]


def everything_on(workflow: Mapping[str, Any]) -> dict[str, Any]:
    """The workflow with each part running that a template leaves off at first."""
    made = json.loads(json.dumps(workflow))
    for node in all_nodes(made):
        node["mode"] = 0
    return made


def with_our_loader(prompt: Mapping[str, Any], degree: int = 0, dtype: str | None = None) -> dict[str, Any]:
    """The prompt with Load TP Model for each loader of a model of ours, its CLIP and VAE still from the old one.

    `dtype`: instead of the old loader's.
    """
    made = json.loads(json.dumps(prompt))
    for number, node in prompt.items():
        widget = LOADERS.get(node["class_type"])
        if widget is None or family_of(str(node["inputs"][widget])) is None:
            continue
        ours = {
            "model": node["inputs"][widget],
            "degree": degree,
            "devices": "auto",
            "dtype": dtype or DTYPES.get(node["inputs"].get("weight_dtype", ""), "default"),
            "policy": "keep",
        }
        if node["class_type"] == "UNETLoader":
            made[number] = {"class_type": "TPLoadModel", "inputs": ours}
            continue
        made[f"{number}:tp"] = {"class_type": "TPLoadModel", "inputs": ours}
        for other in made.values():
            for name, value in other["inputs"].items():
                if value == [number, 0]:
                    other["inputs"][name] = [f"{number}:tp", 0]
    return made
