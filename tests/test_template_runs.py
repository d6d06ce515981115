"""The official FLUX.2 templates run on small files: with Load TP Model they give the picture of ComfyUI's own loader."""

from __future__ import annotations

import io
import uuid
import zlib
from typing import Any

import matrix_record
import pytest
import template_files
from official_templates import everything_on, templates, with_our_loader
from PIL import Image, ImageChops, ImageStat
from template_prompts import Converter, Prompt, complete

from comfy_tp.comfyui import ComfyServer, ExecutionFailed

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]

RUN = (
    "image_flux2",
    "image_flux2_fp8",
    "image_flux2_klein_image_edit_4b_base",
    "image_flux2_klein_image_edit_4b_distilled",
    "image_flux2_klein_image_edit_9b_base",
    "image_flux2_klein_image_edit_9b_distilled",
    "image_flux2_klein_text_to_image",
    "image_flux2_text_to_image",
    "image_flux2_text_to_image_9b",
)
# Name -> what the sentence that refuses it says.
REFUSED = {"image_flux2_klein_9b_kv_image_edit": "default_ref_method"}
SMALL_DECODER, FULL_DECODER = "full_encoder_small_decoder.safetensors", "flux2-vae.safetensors"
SMALLER = {1024: 64, 20: 2, 8: 2, 4: 2}  # sizes and steps
# Of 255: sums run in another order on two ranks.
TOLERANCE = 1
# The mean where ComfyUI writes a LoRA into fp8 weights, which rounds them anew; ours stay as they are.
ROUNDED = 4.0

found: dict[str, dict[str, Any]] = {}


@pytest.fixture(scope="module", autouse=True)
def files(comfy: ComfyServer):
    """The templates' files; what the tests find is written down in the end."""
    template_files.write_files(comfy.models)
    yield
    matrix_record.write("template-runs", found)


@pytest.fixture(scope="module")
def small_decoder(comfy: ComfyServer, files: None) -> bool:
    """Whether this ComfyUI reads the VAE with the small decoder."""
    node = {
        "1": {"class_type": "VAELoader", "inputs": {"vae_name": SMALL_DECODER}},
        "2": {"class_type": "EmptyFlux2LatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
        "3": {"class_type": "VAEDecode", "inputs": {"samples": ["2", 0], "vae": ["1", 0]}},
        "4": {"class_type": "SaveImage", "inputs": {"images": ["3", 0], "filename_prefix": uuid.uuid4().hex}},
    }
    try:
        comfy.run(node, 300)
    except ExecutionFailed as failed:
        assert failed.node_type in ("VAELoader", "VAEDecode"), failed
        return False
    return True


def test_every_flux2_template_is_run_or_refused() -> None:
    names = {one.name for one in templates() if one.families == ("FLUX.2",)}
    assert names == {*RUN, *REFUSED}


@pytest.mark.parametrize("name", RUN)
def test_it_gives_the_picture_of_the_stock_loader(
    comfy: ComfyServer, shapes: dict[str, Any], small_decoder: bool, name: str
) -> None:
    prompt = queued(name, shapes)
    made = small(comfy, prompt, small_decoder=small_decoder)
    # ComfyUI computes in float32 on the CPU.
    stock, ours = (
        pictures(comfy, with_stock_loader(made)),
        pictures(comfy, with_our_loader(made, 2, "float32")),
    )
    assert stock.keys() == ours.keys() != set()
    for node, picture in stock.items():
        assert all(low + 50 < high for low, high in picture.getextrema()), f"nothing is in picture {node}"
        assert difference(picture, ours[node]) <= TOLERANCE
    if switch := turbo_switch(prompt):
        made[switch]["inputs"]["value"] = True
        turbo = pictures(comfy, with_our_loader(made, 2, "float32"))
        exact = pictures(comfy, with_stock_loader(made, template_files.EXACT))
        rounded = pictures(comfy, with_stock_loader(made))
        for node, picture in turbo.items():
            assert difference(picture, exact[node]) <= TOLERANCE
            assert mean(picture, rounded[node]) <= ROUNDED < mean(picture, ours[node]) / 2
    found[name] = {"ran": True, "small_decoder": small_decoder}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_run_is_refused_with_a_sentence(
    comfy: ComfyServer, shapes: dict[str, Any], small_decoder: bool, name: str
) -> None:
    made = small(comfy, queued(name, shapes), small_decoder=small_decoder)
    assert pictures(comfy, with_stock_loader(made))
    with pytest.raises(ExecutionFailed) as refused:
        comfy.run(with_our_loader(made, 2), 300)
    sentence = str(refused.value.exception_message).strip()
    assert REFUSED[name] in sentence
    found[name] = {"refused": sentence}


def turbo_switch(prompt: Prompt) -> str | None:
    """The node that turns a template's Turbo LoRA on; it is off at first."""
    return next((number for number, node in prompt.items() if node["class_type"] == "PrimitiveBoolean"), None)


def queued(name: str, shapes: dict[str, Any]) -> Prompt:
    """What a template queues with every part on. Skips where this ComfyUI lacks a node."""
    template = next(one for one in templates() if one.name == name)
    missing = Converter(template.workflow, shapes).missing()
    if missing:
        found[name] = {"missing": missing}
        pytest.skip(f"ComfyUI {matrix_record.release()} has no {', '.join(missing)}")
    return complete(Converter(everything_on(template.workflow), shapes).prompt(), shapes)


def small(comfy: ComfyServer, prompt: Prompt, *, small_decoder: bool) -> Prompt:
    """The prompt at a small size, random conditionings for those of its text encoder. Its files keep their names."""
    (width,) = {
        template_files.width_of(node["inputs"]["unet_name"])
        for node in prompt.values()
        if node["class_type"] == "UNETLoader"
    }
    changes: dict[str, dict[str, Any]] = {
        "LoadImage": {"image": comfy.upload_image(gradient(), "gradient.png")},
        "ImageScaleToTotalPixels": {"megapixels": 0.01},
        "SaveImage": {"filename_prefix": uuid.uuid4().hex},
        "VAELoader": {} if small_decoder else {"vae_name": FULL_DECODER},
    }
    made: Prompt = {}
    for number, node in prompt.items():
        kind, inputs = node["class_type"], {**node["inputs"], **changes.get(node["class_type"], {})}
        if kind in ("Flux2Scheduler", "EmptyFlux2LatentImage", "PrimitiveInt"):
            inputs = {
                key: SMALLER.get(value, value) if isinstance(value, int) else value
                for key, value in inputs.items()
            }
        if kind == "CLIPTextEncode":
            kind = "TPTestConditioning"
            inputs = {"seed": zlib.crc32(number.encode()) % 2**31, "length": 40, "width": width}
        if kind != "CLIPLoader":
            made[number] = {"class_type": kind, "inputs": inputs}
    return made


def with_stock_loader(prompt: Prompt, prefix: str = "") -> Prompt:
    """The prompt with ComfyUI's own loader, told the number of heads. The names of its files begin with `prefix`."""
    stock = {
        number: {"class_type": "TPTestStockModel", "inputs": {"model": prefix + node["inputs"]["unet_name"]}}
        for number, node in prompt.items()
        if node["class_type"] == "UNETLoader"
    }
    return {**prompt, **stock}


def pictures(comfy: ComfyServer, prompt: Prompt) -> dict[str, Image.Image]:
    """The picture of each SaveImage."""
    entry = comfy.run(prompt, 600)
    return {
        number: Image.open(io.BytesIO(comfy.view(output["images"][0]))).convert("RGB")
        for number, output in entry["outputs"].items()
        if output.get("images") and prompt[number]["class_type"] == "SaveImage"
    }


def gradient() -> bytes:
    file = io.BytesIO()
    Image.linear_gradient("L").convert("RGB").save(file, "PNG")
    return file.getvalue()


def difference(one: Image.Image, other: Image.Image) -> int:
    """The largest difference of a colour value, of 255."""
    return max(high for _, high in ImageChops.difference(one, other).getextrema())


def mean(one: Image.Image, other: Image.Image) -> float:
    return sum(ImageStat.Stat(ImageChops.difference(one, other)).mean) / 3
