"""The files in workflows/: opened in ComfyUI's own frontend, and run on small stand-in files."""

from __future__ import annotations

import copy
import importlib.util
import io
import json
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from browser_session import Browser
from flux2_files import fp8_tensors, save_single_file, single_file_tensors, small_flux2
from held_server import held, named_files, objections
from matrix_record import release
from PIL import Image, ImageChops
from template_prompts import Converter, known
from workflow_files import COMFYUI, FOLDER, WORKFLOWS, api_format, ui_format

from comfy_tp.comfyui import ComfyServer

NAMES = list(WORKFLOWS)
WIDTH = 48  # of the stand-ins' conditioning
SIZE = 64  # pixels
STAND_IN = "workflow-stand-in"


def read(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The UI file and the API file of that name."""
    return (
        json.loads((FOLDER / f"{name}.json").read_text()),
        json.loads((FOLDER / "api" / f"{name}.json").read_text()),
    )


def test_there_is_an_api_file_for_every_workflow_and_no_other_file() -> None:
    assert sorted(path.name for path in FOLDER.glob("*.json")) == sorted(f"{name}.json" for name in NAMES)
    assert sorted(path.name for path in (FOLDER / "api").glob("*.json")) == sorted(
        f"{name}.json" for name in NAMES
    )


def test_the_files_are_what_is_written_for_the_oldest_comfyui(shapes: dict[str, Any]) -> None:
    if release() != COMFYUI:
        pytest.skip(f"the files are written with ComfyUI {COMFYUI}")
    for name in NAMES:
        ui, api = read(name)
        assert api == api_format(WORKFLOWS[name], shapes)
        assert ui == ui_format(name, WORKFLOWS[name], shapes)


@pytest.mark.parametrize("name", NAMES)
def test_the_files_fit_the_nodes_as_they_are(shapes: dict[str, Any], name: str) -> None:
    ui, api = read(name)
    assert Converter(ui, shapes).prompt() == known(api, shapes)


@pytest.mark.parametrize("name", NAMES)
def test_the_frontend_opens_it_whole_and_queues_the_api_file(
    browser: Browser, shapes: dict[str, Any], name: str
) -> None:
    ui, api = read(name)
    seen = browser.open(FOLDER / f"{name}.json")
    assert seen["missingNodeTypes"] == []
    assert seen["validationErrors"] == []
    assert sorted(seen["nodeTypes"]) == sorted(node["type"] for node in ui["nodes"])
    assert known(seen["apiPrompt"], shapes) == known(api, shapes)
    titles = {number: node["_meta"]["title"] for number, node in api.items()}
    assert release() != COMFYUI or titles == {
        number: node["_meta"]["title"] for number, node in seen["apiPrompt"].items()
    }


def test_comfyui_accepts_all_of_them_where_the_files_are_there(comfy: ComfyServer) -> None:
    prompts = [read(name)[1] for name in NAMES]
    with named_files(comfy, prompts), held(comfy):
        assert {name: objections(comfy, prompt) for name, prompt in zip(NAMES, prompts, strict=True)} == {
            name: [] for name in NAMES
        }


@pytest.mark.parametrize("name", NAMES)
def test_every_loader_says_where_its_file_comes_from(name: str) -> None:
    ui, _ = read(name)
    loaders = [node for node in ui["nodes"] if "models" in node["properties"]]
    expected = {"CLIPLoader", "TPLoadModel", "VAELoader"} | (
        {"LoraLoaderModelOnly"} if "lora" in name else set()
    )
    assert {node["type"] for node in loaders} == expected and len(loaders) == len(expected)
    for node in loaders:
        (file,) = node["properties"]["models"]
        assert node["widgets_values"][0] == file["name"]
        assert file["url"].startswith("https://huggingface.co/") and file["url"].endswith(f"/{file['name']}")
        assert f"/{file['directory']}/" in file["url"] or "split_files" not in file["url"]


def test_the_two_references_are_wired_as_in_comfyuis_own_template() -> None:
    """The template of this ComfyUI that has two references; its loader is exchanged, its sizes are widgets here."""
    if release() != COMFYUI:
        pytest.skip(
            f"the templates of ComfyUI {release()} switch parts on and off, those of {COMFYUI} do not"
        )
    (path,) = (folder / "templates" / "image_flux2_fp8.json" for folder in template_folders())
    template = json.loads(path.read_text(encoding="utf-8"))
    ui, _ = read("flux2_two_references")
    assert wiring(ui) == wiring(template)


def template_folders() -> list[Path]:
    """The folder of the installed package that holds the templates of image models."""
    spec = importlib.util.find_spec("comfyui_workflow_templates_media_image")
    return [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []


def wiring(workflow: dict[str, Any]) -> list[tuple[str, int, str, str]]:
    """Every connection as (from what, its output, to what, its input), without where widgets get their values."""
    nodes = {node["id"]: node for node in workflow["nodes"]}
    found = []
    for _, source, output, target, slot, _ in workflow["links"]:
        kinds = [nodes[number]["type"].replace("UNETLoader", "TPLoadModel") for number in (source, target)]
        if kinds[0] != "PrimitiveNode":
            found.append((kinds[0], output, kinds[1], nodes[target]["inputs"][slot]["name"]))
    return sorted(found)


def test_comfyuis_template_browser_lists_them(comfy: ComfyServer) -> None:
    listed = comfy.get("/api/workflow_templates")
    assert NAMES in [sorted(names, key=NAMES.index) for names in listed.values() if set(names) == set(NAMES)]


@pytest.fixture(scope="module")
def stand_ins(comfy: ComfyServer) -> ComfyServer:
    """Small files in place of the real ones: FLUX.2 in fp8, klein with a prefix, a VAE folder, a LoRA."""
    from diffusers import AutoencoderKLFlux2

    models = comfy.models / "diffusion_models"
    held, metadata, _ = fp8_tensors(
        single_file_tensors(drawn(small_flux2(joint_attention_dim=WIDTH))), "metadata"
    )
    save_single_file(models / f"{STAND_IN}-dev.safetensors", held, metadata)
    klein = drawn(small_flux2(seed=1, joint_attention_dim=WIDTH, guidance_embeds=False))
    save_single_file(
        models / f"{STAND_IN}-klein.safetensors", single_file_tensors(klein, "model.diffusion_model.")
    )
    torch.manual_seed(2)
    vae = AutoencoderKLFlux2(
        block_out_channels=(16, 32, 32, 32), layers_per_block=1, norm_num_groups=8, latent_channels=32
    )
    vae.bn.running_mean.normal_()
    vae.bn.running_var.uniform_(0.5, 2.0)
    vae.save_pretrained(comfy.models / "diffusers" / STAND_IN / "vae")
    layers = {"double_blocks.0.img_attn.qkv": (384, 128), "single_blocks.1.linear1": (1152, 128)}
    lora = {}
    for name, (out, into) in layers.items():
        lora[f"diffusion_model.{name}.lora_A.weight"] = torch.randn(4, into) / into**0.5
        lora[f"diffusion_model.{name}.lora_B.weight"] = torch.randn(out, 4)
    (comfy.models / "loras").mkdir(exist_ok=True)
    save_single_file(comfy.models / "loras" / f"{STAND_IN}.safetensors", lora)
    return comfy


def drawn(model: Any) -> Any:
    """`model` with weights that move a picture as far as the noise does."""
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model


def small(comfy: ComfyServer, name: str, *, degree: int = 2, strength: float = 1.0) -> dict[str, Any]:
    """The API file of a workflow on the stand-ins: other file names, small sizes, two steps; the wiring as it is.

    No small file fits the stock loaders of the text encoder and the VAE, whose sizes ComfyUI fixes: random
    conditionings and Load TP VAE stand in their places.
    """
    gradient = io.BytesIO()
    Image.linear_gradient("L").convert("RGB").save(gradient, "PNG")
    _, api = read(name)
    made = copy.deepcopy(api)
    for number, node in api.items():
        inputs = made[number]["inputs"]
        match node["class_type"]:
            case "TPLoadModel":
                kind = "klein" if "klein" in inputs["model"] else "dev"
                inputs |= {"model": f"{STAND_IN}-{kind}.safetensors", "degree": degree}
            case "CLIPLoader":
                del made[number]
            case "CLIPTextEncode":
                length = 512 if "klein" in name else 30 + int(number)
                values = {"seed": int(number), "length": length, "width": WIDTH}
                made[number] = {"class_type": "TPTestConditioning", "inputs": values}
            case "VAELoader":
                values = {"vae": STAND_IN, "degree": degree, "devices": "auto", "dtype": "float32"}
                made[number] = {"class_type": "TPLoadVAE", "inputs": {**values, "policy": "keep"}}
            case "LoraLoaderModelOnly":
                inputs |= {"lora_name": f"{STAND_IN}.safetensors", "strength_model": strength}
            case "SaveImage":
                inputs["filename_prefix"] = uuid.uuid4().hex  # ComfyUI saves nothing for a prompt it has run
            case "LoadImage":
                inputs["image"] = comfy.upload_image(gradient.getvalue(), "gradient.png")
            case "ImageScaleToTotalPixels":
                inputs["megapixels"] = (2 * SIZE / 1024) ** 2
            case "Flux2Scheduler" | "EmptyFlux2LatentImage":
                changed = {"steps": 2, "width": SIZE, "height": SIZE}
                inputs |= {key: new for key, new in changed.items() if isinstance(inputs.get(key), int)}
    return made


def picture(comfy: ComfyServer, prompt: dict[str, Any]) -> Image.Image:
    """The one picture of a run."""
    (png,) = comfy.images(comfy.run(prompt, 500))
    return Image.open(io.BytesIO(png)).convert("RGB")


def difference(one: Image.Image, other: Image.Image) -> int:
    """The largest difference of a colour value, of 255."""
    return max(high for _, high in ImageChops.difference(one, other).getextrema())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_on_small_files_and_saves_a_picture(stand_ins: ComfyServer, name: str) -> None:
    start = len(stand_ins.log())
    seen = picture(stand_ins, small(stand_ins, name))
    edits = "edit" in name or name.endswith("_reference")  # as large as the picture they edit
    assert seen.size == ((2 * SIZE, 2 * SIZE) if edits else (SIZE, SIZE))
    assert all(low < high for low, high in seen.getextrema())
    assert "Traceback" not in stand_ins.log()[start:]


@pytest.mark.timeout(600)
def test_the_lora_of_the_turbo_workflow_changes_the_picture(stand_ins: ComfyServer) -> None:
    with_lora, without = (
        picture(stand_ins, small(stand_ins, "flux2_turbo_lora", strength=strength)) for strength in (1.0, 0.0)
    )
    assert difference(with_lora, without) > 8


@pytest.mark.timeout(600)
def test_one_rank_runs_a_workflow_as_it_is_shipped_and_the_log_says_so(stand_ins: ComfyServer) -> None:
    name = "flux2_klein_4b_distilled"
    start = len(stand_ins.log())
    alone = picture(stand_ins, small(stand_ins, name, degree=0))  # degree 0 and devices auto, as in the file
    log = stand_ins.log()[start:]
    assert f"{STAND_IN}-klein.safetensors, degree 1: one rank on the CPU; set degree to use more" in log
    assert difference(alone, picture(stand_ins, small(stand_ins, name))) <= 2
