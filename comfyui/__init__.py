"""A real ComfyUI as a child process, for the demo and for the tests, and ``comfy-tp comfyui``, which fetches it.

Nothing of ComfyUI is imported here.
"""

from .choose import comfyui_path, newest_path
from .client import ComfyUIError, ExecutionFailed, ExecutionInterrupted, PromptRefused
from .command import add_arguments, run
from .environment import comfyui_python
from .events import EventStream, Preview
from .server import ComfyServer
from .tree import printed

__all__ = [
    "ComfyServer",
    "ComfyUIError",
    "EventStream",
    "ExecutionFailed",
    "ExecutionInterrupted",
    "Preview",
    "PromptRefused",
    "add_arguments",
    "comfyui_path",
    "comfyui_python",
    "newest_path",
    "printed",
    "run",
]
