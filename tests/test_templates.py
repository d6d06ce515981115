"""ComfyUI's own templates with Load TP Model for their loader: which of them the server accepts as it accepts the originals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import matrix_record
import pytest
from browser_session import Browser
from held_server import held, named_files, objections
from official_templates import FAMILIES, Template, everything_on, templates, with_our_loader
from template_prompts import Converter, Prompt, complete, known

from comfy_tp.comfyui import ComfyServer

EMPTY = {"nodes": [], "links": [], "groups": [], "version": 0.4, "last_node_id": 0, "last_link_id": 0}
# Nodes that ComfyUI has only where it may call other services, which a test's does not.
SERVICES = {"ByteDanceSeedreamNode", "GeminiImage2Node", "GrokImageEditNode", "OpenAIGPTImage1"}


def test_every_family_has_its_templates() -> None:
    found = {family: [one.name for one in templates() if family in one.families] for family in FAMILIES}
    assert {family: len(names) for family, names in found.items()} == {
        "FLUX.2": 11,
        "FLUX.1": 13,
        "Qwen-Image": 30,
    }


def test_the_server_accepts_every_template_with_our_loader_as_it_accepts_the_original(
    comfy: ComfyServer, shapes: dict[str, Any]
) -> None:
    verdicts: dict[str, dict[str, Any]] = {}
    asked: dict[str, list[Prompt]] = {}
    for template in templates():
        missing = Converter(template.workflow, shapes).missing()
        verdicts[template.label] = {"families": template.families, "missing": missing}
        if SERVICES.issuperset(missing):
            forms = (template.workflow, everything_on(template.workflow))
            asked[template.label] = [complete(Converter(form, shapes).prompt(), shapes) for form in forms]
    ours = {name: [with_our_loader(prompt) for prompt in prompts] for name, prompts in asked.items()}
    wrong = {}
    with (
        named_files(comfy, [p for prompts in (*asked.values(), *ours.values()) for p in prompts]),
        held(comfy),
    ):
        for name, prompts in asked.items():
            verdicts[name]["refused"] = refused = objections(comfy, ours[name][0])
            if refused != objections(comfy, prompts[0]) or loads(ours[name][0]) == 0:
                wrong[name] = refused
            if objections(comfy, ours[name][1]) != objections(comfy, prompts[1]):
                wrong[f"{name} with every part on"] = objections(comfy, ours[name][1])
    matrix_record.write("templates", verdicts)
    assert wrong == {}


# The frontend may let a workflow go while it still opens the one before, and two of them may look alike.
CONVERT = """(async (workflows) => {
  const shown = (nodes) => nodes.map((node) => `${node.id} ${node.type}`).sort().join()
  const open = async (name, workflow) => {
    for (let tries = 0; tries < 20 && shown(app.graph.nodes) !== shown(workflow.nodes); tries++) {
      await app.loadGraphData(workflow, true, true, name)
      await new Promise((done) => setTimeout(done, 100 * tries))
    }
  }
  const prompts = []
  for (const [name, workflow] of workflows) {
    await open('nothing', %s)
    await open(name, workflow)
    prompts.push((await app.graphToPrompt()).output)
  }
  return prompts
})(%s)"""


@pytest.mark.matrix
def test_a_template_is_queued_as_a_frontend_not_older_than_it_queues_it(
    browser: Browser, shapes: dict[str, Any]
) -> None:
    here = [one for one in templates() if not Converter(one.workflow, shapes).missing()]
    convert = CONVERT % (json.dumps(EMPTY), json.dumps([[one.name, one.workflow] for one in here]))
    seen = browser.open(EMPTY, evaluate={"prompts": convert}, timeout_s=280)
    differing, compared = {}, 0
    for template, queued in zip(here, seen["evaluated"]["prompts"], strict=True):
        if saved_by(template) > version(seen["frontend"]):
            continue
        compared += 1
        ours = complete(Converter(template.workflow, shapes).prompt(), shapes)
        theirs = complete(known(queued, shapes), shapes)
        numbers = sorted(ours.keys() | theirs.keys())
        apart = {
            number: (ours.get(number), theirs.get(number))
            for number in numbers
            if ours.get(number) != theirs.get(number)
        }
        if apart:
            differing[template.label] = apart
    assert differing == {}
    assert compared >= 5


def saved_by(template: Template) -> tuple[int, ...]:
    """The frontend that a template was saved with; one that does not say is an old one."""
    return version(template.workflow.get("extra", {}).get("frontendVersion") or "0")


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def loads(prompt: Mapping[str, Any]) -> int:
    """How many of our loaders the outputs of a prompt need."""
    return sum(node["class_type"] == "TPLoadModel" for node in prompt.values())
