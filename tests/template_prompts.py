"""A workflow as the frontend saves it, turned into the prompt that the frontend would queue.

The reference is the frontend's own ``graphToPrompt``; test_templates.py holds this to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}
DYNAMIC = "COMFY_DYNAMICCOMBO_V3"
MUTED, BYPASSED = 2, 4
Prompt = dict[str, dict[str, Any]]
NOTES = {"Note", "MarkdownNote"}
VIRTUAL = {"Reroute", "PrimitiveNode", *NOTES}
# The nodes in a subgraph that stand for its own inputs and outputs.
INSIDE, OUTSIDE = -10, -20


@dataclass(frozen=True)
class Link:
    """From output `slot` of node `origin` to an input."""

    origin: Any
    slot: int


@dataclass(frozen=True)
class Constant:
    """What an input gets that no node gives anything: a promoted widget's value, or a PrimitiveNode's."""

    value: Any


@dataclass
class Scope:
    """One graph as it is placed: the workflow itself, or a subgraph behind the node `host` of `parent`."""

    nodes: dict[Any, dict[str, Any]]
    links: dict[int, Link]
    graph: Mapping[str, Any]
    path: tuple[str, ...] = ()
    parent: Scope | None = None
    host: dict[str, Any] = field(default_factory=dict)

    def id_of(self, node: Mapping[str, Any]) -> str:
        return ":".join((*self.path, str(node["id"])))


class Converter:
    """Turns one workflow into a prompt. `shapes` is ComfyUI's /object_info."""

    def __init__(self, workflow: Mapping[str, Any], shapes: Mapping[str, Any]):
        self.shapes = shapes
        self.subgraphs = {
            graph["id"]: graph for graph in workflow.get("definitions", {}).get("subgraphs", [])
        }
        self.root = _scope(workflow)

    def prompt(self) -> Prompt:
        """The nodes that would be queued, by their ids; nodes of unknown types are left out (`missing`)."""
        return {
            scope.id_of(node): {"class_type": node["type"], "inputs": self._inputs(scope, node)}
            for scope, node in self._executed(self.root)
            if node["type"] in self.shapes
        }

    def missing(self) -> list[str]:
        """The types of nodes, queued or not, that this ComfyUI does not have."""
        return sorted({node["type"] for _, node in self._nodes(self.root)} - self.shapes.keys())

    def _nodes(self, scope: Scope) -> Iterator[tuple[Scope, dict[str, Any]]]:
        for node in scope.nodes.values():
            if node["type"] in self.subgraphs:
                yield from self._nodes(self._inside(scope, node))
            elif node["type"] not in VIRTUAL:
                yield scope, node

    def _executed(self, scope: Scope) -> Iterator[tuple[Scope, dict[str, Any]]]:
        for node in scope.nodes.values():
            if node.get("mode") in (MUTED, BYPASSED):
                continue
            if node["type"] in self.subgraphs:
                yield from self._executed(self._inside(scope, node))
            elif node["type"] not in VIRTUAL:
                yield scope, node

    def _inside(self, scope: Scope, node: dict[str, Any]) -> Scope:
        made = _scope(self.subgraphs[node["type"]])
        made.path, made.parent, made.host = (*scope.path, str(node["id"])), scope, node
        return made

    def _inputs(self, scope: Scope, node: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(widget_values(node, self.shapes[node["type"]]))
        for entry in node.get("inputs", []):
            if entry.get("link") is None:
                continue
            source = self._follow(scope, scope.links.get(entry["link"]))
            if isinstance(source, Constant):
                found[entry["name"]] = source.value
            elif source is not None:
                found[entry["name"]] = source
            elif not entry.get("widget"):
                found.pop(entry["name"], None)
        return found

    def _follow(self, scope: Scope, link: Link | None) -> list[Any] | Constant | None:
        """Where a link begins: [node id, output], a constant, or None where nothing is connected."""
        if link is None:
            return None
        if link.origin == INSIDE:
            return self._from_host(scope, link.slot)
        node = scope.nodes.get(link.origin)
        if node is None or node.get("mode") == MUTED:
            return None
        if node.get("mode") == BYPASSED:
            return self._follow(scope, _bypass(scope, node, link.slot))
        if node["type"] == "Reroute":
            return self._follow(scope, _linked(scope, node["inputs"][0]))
        if node["type"] == "PrimitiveNode":
            return Constant(node["widgets_values"][0])
        if node["type"] in self.subgraphs:
            inside = self._inside(scope, node)
            ends = inside.graph["outputs"][link.slot]["linkIds"]
            return self._follow(inside, inside.links.get(ends[0]) if ends else None)
        return [scope.id_of(node), link.slot]

    def _from_host(self, scope: Scope, slot: int) -> list[Any] | Constant | None:
        """What reaches input `slot` of a subgraph from the graph around it: a node's output, or the promoted widget."""
        assert scope.parent is not None
        name = scope.graph["inputs"][slot]["name"]
        entry = next((entry for entry in scope.host.get("inputs", []) if entry["name"] == name), {})
        link = _linked(scope.parent, entry)
        if link is not None:
            return self._follow(scope.parent, link)
        own = promoted_values(scope)
        return Constant(own[name]) if name in own else None


def complete(prompt: Prompt, shapes: Mapping[str, Any]) -> Prompt:
    """The outputs of a prompt that lack no node, with all that they need; the server reads no more of it."""
    kept: Prompt = {}
    for number, node in prompt.items():
        if shapes[node["class_type"]]["output_node"]:
            needed = _needed(prompt, number)
            if needed is not None:
                kept |= {other: prompt[other] for other in prompt if other in needed}
    return kept


def _needed(prompt: Prompt, number: str) -> set[str] | None:
    """The nodes behind a node, itself among them; None where one is not there."""
    found, waiting = set(), [number]
    while waiting:
        now = waiting.pop()
        if now not in prompt:
            return None
        if now not in found:
            found.add(now)
            waiting += [value[0] for value in prompt[now]["inputs"].values() if isinstance(value, list)]
    return found


def known(prompt: Mapping[str, Any], shapes: Mapping[str, Any]) -> Prompt:
    """A prompt's nodes with the inputs that this ComfyUI has; it does not read others, nor titles."""
    found = {}
    for number, node in prompt.items():
        inputs = shapes[node["class_type"]]["input"]
        names = {*inputs.get("required", ()), *inputs.get("optional", ())}
        values = {name: value for name, value in node["inputs"].items() if name.split(".")[0] in names}
        found[number] = {"class_type": node["class_type"], "inputs": values}
    return found


def promoted_values(scope: Scope) -> dict[str, Any]:
    """The values that the node of a subgraph holds for its promoted widgets; older files leave them to the inside."""
    stored = scope.host.get("widgets_values") or []
    if "proxyWidgets" in scope.host.get("properties", {}):
        return {}
    named = scope.host.get("widgets_values_named")
    if named is not None:
        return dict(named)
    names = [entry["name"] for entry in scope.graph["inputs"] if _is_widget(scope, entry)]
    return dict(zip(names, stored, strict=True)) if len(names) == len(stored) else {}


def _is_widget(scope: Scope, entry: Mapping[str, Any]) -> bool:
    """Whether an input of a subgraph ends in a widget."""
    ends = set(entry.get("linkIds") or ())
    sockets = (socket for node in scope.nodes.values() for socket in node.get("inputs", ()))
    return any(socket.get("link") in ends and "widget" in socket for socket in sockets)


def widget_values(node: Mapping[str, Any], shape: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values of a node's widgets by name. Those that the file does not hold are at their defaults."""
    stored = node.get("widgets_values") or []
    if isinstance(stored, Mapping):
        stored = list(stored.values())
    yield from _values(iter(stored), shape["input"], shape.get("input_order"), "")


def _values(
    stored: Iterator[Any], groups: Mapping[str, Any], order: Mapping[str, Any] | None, prefix: str
) -> Iterator[tuple[str, Any]]:
    for group in ("required", "optional"):
        entries = groups.get(group, {})
        for name in order[group] if order and group in order else entries:
            kind, *rest = entries[name]
            options = rest[0] if rest else {}
            if options.get("forceInput"):
                continue
            if options.get("socketless"):
                # A list would be taken for a connection.
                yield prefix + name, {"__value__": next(stored, ["", ""])}
            elif isinstance(kind, list) or kind in WIDGETS:
                yield prefix + name, next(stored, _default(kind, options))
                if options.get("control_after_generate") or (
                    kind == "INT" and name in ("seed", "noise_seed")
                ):
                    next(stored, None)
                if options.get("image_upload"):
                    next(stored, None)
            elif kind == DYNAMIC:
                chosen = next(stored, options["options"][0]["key"])
                yield prefix + name, chosen
                inside = next((one["inputs"] for one in options["options"] if one["key"] == chosen), {})
                yield from _values(stored, inside, None, f"{prefix}{name}.")


def _default(kind: Any, options: Mapping[str, Any]) -> Any:
    plain = {"INT": 0, "FLOAT": 0, "STRING": "", "BOOLEAN": False}
    choices = kind if isinstance(kind, list) else options.get("options", [plain.get(kind)])
    return options.get("default", choices[0] if choices else None)


def _scope(graph: Mapping[str, Any]) -> Scope:
    links = {}
    for link in graph.get("links", []):
        if isinstance(link, Mapping):
            links[link["id"]] = Link(link["origin_id"], link["origin_slot"])
        else:
            links[link[0]] = Link(link[1], link[2])
    return Scope({node["id"]: node for node in graph["nodes"]}, links, graph)


def _linked(scope: Scope, entry: Mapping[str, Any]) -> Link | None:
    number = entry.get("link")
    return None if number is None else scope.links.get(number)


def _bypass(scope: Scope, node: Mapping[str, Any], slot: int) -> Link | None:
    """The input whose value a bypassed node hands on as its output `slot`: the one beside it, else the first that fits."""
    inputs, kind = node.get("inputs", []), node["outputs"][slot]["type"]
    nearest = [*inputs[slot : slot + 1], *inputs]
    return next((_linked(scope, entry) for entry in nearest if entry["type"] in (kind, "*")), None)
