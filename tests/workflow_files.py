"""What the files in workflows/ hold, in short form, and the two formats that it is written in.

    python tests/workflow_files.py

boots ComfyUI for the shapes of its nodes and writes workflows/*.json (for people) and workflows/api/*.json (for
scripts). test_workflows.py opens them in the real frontend.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "workflows"
COMFYUI = "0.3.75"  # the oldest ComfyUI that the workflows are for
WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}
HUB = "https://huggingface.co"
# ImageScaleToTotalPixels. Releases after the oldest ask for resolution_steps too, which that one does not read.
ONE_MEGAPIXEL = {"upscale_method": "lanczos", "megapixels": 1.0, "resolution_steps": 1}


def file(name: str, directory: str, repository: str, folder: str = "") -> dict[str, str]:
    """A model file as ComfyUI's missing-models dialog takes it."""
    return {
        "name": name,
        "url": f"{HUB}/{repository}/resolve/main/{folder}{name}",
        "directory": directory,
    }


def part(name: str, directory: str, repository: str) -> dict[str, str]:
    """A file of one of ComfyUI's own repositories, which sort their files by directory."""
    return file(name, directory, repository, f"split_files/{directory}/")


TRANSFORMER = part("flux2_dev_fp8mixed.safetensors", "diffusion_models", "Comfy-Org/flux2-dev")
TEXT_ENCODER = part("mistral_3_small_flux2_bf16.safetensors", "text_encoders", "Comfy-Org/flux2-dev")
VAE = part("flux2-vae.safetensors", "vae", "Comfy-Org/flux2-dev")
TURBO = file("Flux_2-Turbo-LoRA_comfyui.safetensors", "loras", "ByteZSzn/Flux.2-Turbo-ComfyUI")
KLEIN_4B = part("flux-2-klein-4b.safetensors", "diffusion_models", "Comfy-Org/flux2-klein")
KLEIN_4B_BASE = part("flux-2-klein-base-4b.safetensors", "diffusion_models", "Comfy-Org/flux2-klein")
KLEIN_9B = file(
    "flux-2-klein-9b-fp8.safetensors", "diffusion_models", "black-forest-labs/FLUX.2-klein-9b-fp8"
)
KLEIN_9B_BASE = file(
    "flux-2-klein-base-9b-fp8.safetensors", "diffusion_models", "black-forest-labs/FLUX.2-klein-base-9b-fp8"
)
QWEN_4B = part("qwen_3_4b.safetensors", "text_encoders", "Comfy-Org/flux2-klein")
QWEN_8B = part("qwen_3_8b_fp8mixed.safetensors", "text_encoders", "Comfy-Org/flux2-klein-9B")


@dataclass
class Node:
    """One node: its `inputs` are widget values by name, or ("id", slot) where another node is connected."""

    type: str
    column: int
    inputs: dict[str, Any] = field(default_factory=dict)
    title: str | None = None
    models: list[dict[str, str]] = field(default_factory=list)


@dataclass
class Workflow:
    """A graph by node id, and the note beside it."""

    nodes: dict[str, Node]
    note: str


NOTE = """## {title}

{text}

**Files** (ComfyUI/models/)

{files}

**Load TP Model** reads the transformer in shards over all your GPUs; degree 0 lets it choose how many.
"""


def note(title: str, text: str, *files: dict[str, str]) -> str:
    """The note of a workflow; without `files` those of FLUX.2-dev."""
    lines = [
        f"- {file['directory']}/[{file['name']}]({file['url']})"
        for file in files or (TRANSFORMER, TEXT_ENCODER, VAE)
    ]
    return NOTE.format(title=title, text=text, files="\n".join(lines))


def loaders(
    transformer: dict[str, str] = TRANSFORMER, text_encoder: dict[str, str] = TEXT_ENCODER
) -> dict[str, Node]:
    """The three loaders: nodes 1 to 3."""
    return {
        "1": Node(
            "TPLoadModel",
            0,
            {
                "model": transformer["name"],
                "degree": 0,
                "devices": "auto",
                "dtype": "default",
                "policy": "keep",
            },
            models=[transformer],
        ),
        "2": Node(
            "CLIPLoader",
            0,
            {"clip_name": text_encoder["name"], "type": "flux2", "device": "default"},
            models=[text_encoder],
        ),
        "3": Node("VAELoader", 0, {"vae_name": VAE["name"]}, models=[VAE]),
    }


def prompt(text: str) -> dict[str, Node]:
    """The prompt with its guidance: nodes 4 and 5."""
    return {
        "4": Node("CLIPTextEncode", 1, {"clip": ("2", 0), "text": text}, title="Prompt"),
        "5": Node("FluxGuidance", 2, {"conditioning": ("4", 0), "guidance": 4.0}),
    }


def picture(samples: tuple[str, int], name: str, column: int) -> dict[str, Node]:
    """From the latent to the saved picture: nodes 20 and 21."""
    return {
        "20": Node("VAEDecode", column, {"samples": samples, "vae": ("3", 0)}),
        "21": Node("SaveImage", column + 1, {"images": ("20", 0), "filename_prefix": name}),
    }


def tp_sampler(positive: tuple[str, int], negative: tuple[str, int], column: int) -> Node:
    """TP Sampler as FLUX.2-dev wants it: cfg 1, the noise levels of node 7, the latent of node 8."""
    return Node(
        "TPSampler",
        column,
        {
            "model": ("1", 0),
            "seed": 649422536169327,
            "steps": 20,
            "cfg": 1.0,
            "sampler_name": "euler",
            "scheduler": "simple",
            "positive": positive,
            "negative": negative,
            "latent_image": ("8", 0),
            "denoise": 1.0,
            "sigmas": ("7", 0),
        },
    )


def stock_sampler(
    steps: int, column: int, size: tuple[Any, Any] = (1024, 1024), seed: int = 649422536169327
) -> dict[str, Node]:
    """SamplerCustomAdvanced with the guider of node 10: nodes 7, 8, 9, 11 and 12. `size` is width and height."""
    width, height = size
    return {
        "7": Node("Flux2Scheduler", column - 1, {"steps": steps, "width": width, "height": height}),
        "8": Node("EmptyFlux2LatentImage", column - 1, {"width": width, "height": height, "batch_size": 1}),
        "11": Node("RandomNoise", column - 1, {"noise_seed": seed}),
        "12": Node("KSamplerSelect", column - 1, {"sampler_name": "euler"}),
        "9": Node(
            "SamplerCustomAdvanced",
            column + 1,
            {
                "noise": ("11", 0),
                "guider": ("10", 0),
                "sampler": ("12", 0),
                "sigmas": ("7", 0),
                "latent_image": ("8", 0),
            },
        ),
    }


def reference(image: int, *conditionings: tuple[str, int], column: int = 0) -> dict[str, Node]:
    """A picture from node `image` on, scaled to one megapixel, as a reference of each conditioning.

    Its size is node image + 1, ReferenceLatent of the first conditioning image + 4, of the second image + 5.
    """
    first = str(image)
    nodes = {
        first: Node("LoadImage", column, {"image": "example.png"}),
        str(image + 2): Node(
            "ImageScaleToTotalPixels",
            column + 1,
            {"image": (first, 0), **ONE_MEGAPIXEL},
        ),
        str(image + 3): Node("VAEEncode", column + 2, {"pixels": (str(image + 2), 0), "vae": ("3", 0)}),
    }
    for number, conditioning in enumerate(conditionings):
        nodes[str(image + 4 + number)] = Node(
            "ReferenceLatent", column + 3, {"conditioning": conditioning, "latent": (str(image + 3), 0)}
        )
    return nodes


def klein(text: str, *, base: bool) -> dict[str, Node]:
    """The prompt and the negative of klein, nodes 4 and 6: an empty prompt for base, zeros for distilled."""
    return {
        "4": Node("CLIPTextEncode", 1, {"clip": ("2", 0), "text": text}, title="Prompt"),
        "6": Node("CLIPTextEncode", 1, {"clip": ("2", 0), "text": ""}, title="Negative prompt")
        if base
        else Node("ConditioningZeroOut", 2, {"conditioning": ("4", 0)}),
    }


def klein_guider(positive: tuple[str, int], negative: tuple[str, int], column: int, *, base: bool) -> Node:
    """Base is guided at cfg 5; distilled runs at cfg 1, where the negative is not computed."""
    inputs = {"model": ("1", 0), "positive": positive, "negative": negative, "cfg": 5.0 if base else 1.0}
    return Node("CFGGuider", column, inputs)


def klein_text_to_image(
    transformer: dict[str, str], text_encoder: dict[str, str], title: str, *, base: bool
) -> Workflow:
    """Klein's graph: no guidance input, CFGGuider, 20 steps for base and 4 for distilled."""
    steps, cfg = (20, 5) if base else (4, 1)
    return Workflow(
        {
            **loaders(transformer, text_encoder),
            **klein(GLACIER, base=base),
            "10": klein_guider(("4", 0), ("6", 0), 3, base=base),
            **stock_sampler(steps, 3),
            **picture(("9", 0), "comfy-tp/flux2-klein", 5),
        },
        note(
            title,
            f"{steps} steps at cfg {cfg}. "
            + (
                "The negative prompt is used; leave it empty to be guided away from nothing in particular."
                if base
                else "At cfg 1 the negative is not used, so a step is one call of the model."
            ),
            transformer,
            text_encoder,
            VAE,
        ),
    )


def klein_edit(
    transformer: dict[str, str], text_encoder: dict[str, str], title: str, *, base: bool
) -> Workflow:
    """Klein's graph with a picture as a reference of both conditionings; the result has the picture's size."""
    steps, cfg = (20, 5) if base else (4, 1)
    return Workflow(
        {
            **loaders(transformer, text_encoder),
            **klein("Make it a watercolour painting on rough paper, keep the composition", base=base),
            **reference(30, ("4", 0), ("6", 0)),
            "31": Node("GetImageSize", 2, {"image": ("32", 0)}),
            "10": klein_guider(("34", 0), ("35", 0), 4, base=base),
            **stock_sampler(steps, 4, (("31", 0), ("31", 1))),
            **picture(("9", 0), "comfy-tp/flux2-klein-reference", 6),
        },
        note(
            title,
            f"{steps} steps at cfg {cfg}. The picture is a reference of both conditionings. The result has its size, "
            "scaled to one megapixel.",
            transformer,
            text_encoder,
            VAE,
        ),
    )


GLACIER = (
    "A hand-painted wooden sign reading “FROM MANY, ONE” on a mountain path at dawn, low mist over a glacier lake, "
    "wildflowers in the foreground, 35 mm film photograph"
)

WORKFLOWS = {
    "flux2_text_to_image_tp_sampler": Workflow(
        {
            **loaders(),
            **prompt(GLACIER),
            "6": Node("ConditioningZeroOut", 2, {"conditioning": ("4", 0)}),
            "7": Node("Flux2Scheduler", 2, {"steps": 20, "width": 1024, "height": 1024}),
            "8": Node("EmptyFlux2LatentImage", 2, {"width": 1024, "height": 1024, "batch_size": 1}),
            "9": tp_sampler(("5", 0), ("6", 0), 3),
            **picture(("9", 0), "comfy-tp/flux2", 4),
        },
        note(
            "FLUX.2, sharded: text to image",
            "TP Sampler runs the whole loop on the ranks. Flux2Scheduler gives the noise levels, so steps, scheduler "
            "and denoise of TP Sampler are not used. Give Flux2Scheduler and the empty latent the same size. At cfg "
            "1 the negative is not used.",
        ),
    ),
    "flux2_text_to_image_stock_sampler": Workflow(
        {
            **loaders(),
            **prompt(GLACIER),
            "10": Node("BasicGuider", 3, {"model": ("1", 0), "conditioning": ("5", 0)}),
            **stock_sampler(20, 3),
            **picture(("9", 0), "comfy-tp/flux2", 5),
        },
        note(
            "FLUX.2, sharded: text to image with stock nodes",
            "The official FLUX.2 graph with one loader exchanged. The MODEL of Load TP Model works with every stock "
            "sampler and guider.",
        ),
    ),
    "flux2_edit_tp_sampler": Workflow(
        {
            **loaders(),
            **prompt("Make it a watercolour painting on rough paper, keep the composition"),
            "13": Node("LoadImage", 0, {"image": "example.png"}),
            "14": Node(
                "ImageScaleToTotalPixels",
                1,
                {"image": ("13", 0), **ONE_MEGAPIXEL},
            ),
            "15": Node("GetImageSize", 2, {"image": ("14", 0)}),
            "16": Node("VAEEncode", 2, {"pixels": ("14", 0), "vae": ("3", 0)}),
            "17": Node("ReferenceLatent", 3, {"conditioning": ("5", 0), "latent": ("16", 0)}),
            "6": Node("ConditioningZeroOut", 3, {"conditioning": ("4", 0)}),
            "7": Node("Flux2Scheduler", 3, {"steps": 20, "width": ("15", 0), "height": ("15", 1)}),
            "8": Node("EmptyFlux2LatentImage", 3, {"width": ("15", 0), "height": ("15", 1), "batch_size": 1}),
            "9": tp_sampler(("17", 0), ("6", 0), 4),
            **picture(("9", 0), "comfy-tp/flux2-edit", 5),
        },
        note(
            "FLUX.2, sharded: edit a picture",
            "ReferenceLatent hands the picture to the model; chain more of them for more pictures. The result has "
            "the size of the picture, scaled to one megapixel.",
        ),
    ),
    "flux2_two_references": Workflow(
        {
            **loaders(),
            **prompt("The object of the first picture stands in the scene of the second, in the same light"),
            **reference(30, ("5", 0)),
            **reference(40, ("34", 0)),
            "10": Node("BasicGuider", 4, {"model": ("1", 0), "conditioning": ("44", 0)}),
            **stock_sampler(20, 4),
            **picture(("9", 0), "comfy-tp/flux2-references", 6),
        },
        note(
            "FLUX.2, sharded: two reference pictures",
            "Each ReferenceLatent adds a picture to the one before; chain as many as you need. Every picture makes "
            "each step longer. The prompt may speak of the first and the second picture.",
        ),
    ),
    "flux2_turbo_lora": Workflow(
        {
            **loaders(),
            **prompt(GLACIER),
            "13": Node(
                "LoraLoaderModelOnly",
                1,
                {"model": ("1", 0), "lora_name": TURBO["name"], "strength_model": 1.0},
                models=[TURBO],
            ),
            "10": Node("BasicGuider", 3, {"model": ("13", 0), "conditioning": ("5", 0)}),
            **stock_sampler(8, 3),
            **picture(("9", 0), "comfy-tp/flux2-turbo", 5),
        },
        note(
            "FLUX.2, sharded: 8 steps with the Turbo LoRA",
            "The stock LoRA loader works on the sharded model: every rank gets its slice of the LoRA. Changing the "
            "strength or the file does not load the model again.",
            TRANSFORMER,
            TURBO,
            TEXT_ENCODER,
            VAE,
        ),
    ),
    "flux2_klein_4b_base": klein_text_to_image(
        KLEIN_4B_BASE, QWEN_4B, "FLUX.2 klein 4B base, sharded", base=True
    ),
    "flux2_klein_4b_distilled": klein_text_to_image(
        KLEIN_4B, QWEN_4B, "FLUX.2 klein 4B distilled, sharded", base=False
    ),
    "flux2_klein_9b_base": klein_text_to_image(
        KLEIN_9B_BASE, QWEN_8B, "FLUX.2 klein 9B base, sharded", base=True
    ),
    "flux2_klein_9b_distilled": klein_text_to_image(
        KLEIN_9B, QWEN_8B, "FLUX.2 klein 9B distilled, sharded", base=False
    ),
    "flux2_klein_4b_reference": klein_edit(
        KLEIN_4B, QWEN_4B, "FLUX.2 klein 4B distilled, sharded: edit a picture", base=False
    ),
    "flux2_klein_9b_base_reference": klein_edit(
        KLEIN_9B_BASE, QWEN_8B, "FLUX.2 klein 9B base, sharded: edit a picture", base=True
    ),
}


def api_format(workflow: Workflow, shapes: dict[str, Any]) -> dict[str, Any]:
    """The graph as ``POST /prompt`` takes it. `shapes` is ComfyUI's /object_info."""
    prompt = {}
    for node_id, node in workflow.nodes.items():
        prompt[node_id] = {
            "class_type": node.type,
            "inputs": {
                name: [value[0], value[1]] if isinstance(value, tuple) else value
                for name, value in node.inputs.items()
            },
            "_meta": {"title": node.title or shapes[node.type]["display_name"] or node.type},
        }
    return prompt


def ui_format(name: str, workflow: Workflow, shapes: dict[str, Any]) -> dict[str, Any]:
    """The graph as the frontend saves it, schema 0.4, laid out in columns."""
    placed = _places(workflow, shapes)
    outgoing: dict[tuple[str, int], list[int]] = {}
    links: list[list[Any]] = []
    nodes = []
    for node_id, node in workflow.nodes.items():
        sockets = []
        widgets = []
        for input_name, (kind, options) in _inputs(shapes[node.type]).items():
            value = node.inputs.get(input_name)
            connected = isinstance(value, tuple)
            entry: dict[str, Any] = {"name": input_name, "type": kind, "link": None}
            if kind in WIDGETS:
                entry["widget"] = {"name": input_name}
                widgets.append((input_name, _default(options) if connected else value, options))
            sockets.append((kind in WIDGETS, entry, value if connected else None))
        sockets.sort(
            key=lambda socket: socket[0]
        )  # connections first, then widgets, as the frontend draws them
        for slot, (_, entry, source) in enumerate(sockets):
            if source is None:
                continue
            link = len(links) + 1
            links.append([link, int(source[0]), source[1], int(node_id), slot, entry["type"]])
            outgoing.setdefault(source, []).append(link)
            entry["link"] = link
        ours = node.type.startswith("TP")
        properties: dict[str, Any] = {
            "Node name for S&R": node.type,
            "cnr_id": "comfy-tp" if ours else "comfy-core",
            "ver": version("comfy-tp") if ours else COMFYUI,
        }
        if node.models:
            properties["models"] = node.models
        made: dict[str, Any] = {
            "id": int(node_id),
            "type": node.type,
            **placed[node_id],
            "flags": {},
            "order": len(nodes),
            "mode": 0,
            "inputs": [entry for _, entry, _ in sockets],
            "outputs": [],
            "properties": properties,
            "widgets_values": _widget_values(widgets),
        }
        if node.title:
            made["title"] = node.title
        nodes.append(made)
    for made in nodes:
        shape = shapes[made["type"]]
        made["outputs"] = [
            {"name": label, "type": kind, "links": outgoing.get((str(made["id"]), slot))}
            for slot, (label, kind) in enumerate(zip(shape["output_name"], shape["output"], strict=True))
        ]
    note_id = max(made["id"] for made in nodes) + 1
    nodes.append(
        {
            "id": note_id,
            "type": "MarkdownNote",
            "pos": [-480, 0],
            "size": [420, 420],
            "flags": {},
            "order": len(nodes),
            "mode": 0,
            "inputs": [],
            "outputs": [],
            "title": "About this workflow",
            "properties": {},
            "widgets_values": [workflow.note],
            "color": "#432",
            "bgcolor": "#653",
        }
    )
    return {
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"comfy-tp/workflows/{name}")),
        "revision": 0,
        "last_node_id": note_id,
        "last_link_id": len(links),
        "nodes": nodes,
        "links": links,
        "groups": [],
        "config": {},
        "extra": {"ds": {"scale": 0.7, "offset": [560, 120]}},
        "version": 0.4,
    }


def _inputs(shape: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> (type, options) of a node's inputs in order; a list of choices is a COMBO."""
    found = {}
    for group in ("required", "optional"):
        for name in shape["input_order"].get(group, []):
            kind, *rest = shape["input"][group][name]
            options = dict(rest[0]) if rest else {}
            if isinstance(kind, list):
                options.setdefault("options", kind)
                kind = "COMBO"
            found[name] = (kind, options)
    return found


def _default(options: dict[str, Any]) -> Any:
    """What a widget shows whose input is connected."""
    return options.get("default", 0)


def _widget_values(widgets: list[tuple[str, Any, dict[str, Any]]]) -> list[Any]:
    """Positional values: a seed is followed by what happens to it after each run, an upload by its button."""
    values = []
    for _, value, options in widgets:
        values.append(value)
        if options.get("control_after_generate"):
            values.append("randomize")
        if options.get("image_upload"):
            values.append("image")
    return values


def _places(workflow: Workflow, shapes: dict[str, Any]) -> dict[str, dict[str, list[int]]]:
    """Position and size of every node: columns from left to right, nodes of a column below one another."""
    widths = {"CLIPTextEncode": 380, "SaveImage": 480, "LoadImage": 300}
    heights = {"CLIPTextEncode": 180, "SaveImage": 520, "LoadImage": 320, "GetImageSize": 120}
    columns: dict[int, list[str]] = {}
    for node_id, node in workflow.nodes.items():
        columns.setdefault(node.column, []).append(node_id)
    found: dict[str, dict[str, list[int]]] = {}
    left = 0
    for column in sorted(columns):
        top = 0
        width = max(widths.get(workflow.nodes[node_id].type, 300) for node_id in columns[column])
        for node_id in columns[column]:
            kind = workflow.nodes[node_id].type
            inputs = _inputs(shapes[kind])
            rows = sum(kind not in WIDGETS for kind, _ in inputs.values())
            widgets = [options for kind, options in inputs.values() if kind in WIDGETS]
            count = len(widgets) + sum(bool(options.get("control_after_generate")) for options in widgets)
            height = heights.get(kind, 12 + 20 * max(rows, len(shapes[kind]["output"])) + 24 * count)
            found[node_id] = {"pos": [left, top], "size": [width, height]}
            top += height + 60
        left += width + 60
    return found


def main() -> None:
    """Write the files."""
    from comfy_tp.comfyui import ComfyServer

    with ComfyServer() as server:
        shapes = server.object_info()
    (FOLDER / "api").mkdir(parents=True, exist_ok=True)
    for name, workflow in WORKFLOWS.items():
        for path, content in (
            (FOLDER / f"{name}.json", ui_format(name, workflow, shapes)),
            (FOLDER / "api" / f"{name}.json", api_format(workflow, shapes)),
        ):
            path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
            print(path.relative_to(FOLDER.parent))


if __name__ == "__main__":
    main()
