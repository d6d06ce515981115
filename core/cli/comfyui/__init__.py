"""A real ComfyUI as a child process, for the demo and for the tests. Nothing of ComfyUI is imported here."""

from .events import EventStream, Preview
from .server import ComfyServer, ComfyUIError, ExecutionFailed, ExecutionInterrupted, PromptRefused
from .tree import comfyui_path

__all__ = [
    "ComfyServer",
    "ComfyUIError",
    "EventStream",
    "ExecutionFailed",
    "ExecutionInterrupted",
    "Preview",
    "PromptRefused",
    "comfyui_path",
]
