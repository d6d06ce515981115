"""Commands for the tests of the rank group: each shows one thing that a rank may do, good or bad."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from comfy_tp.core import errors


def steps(context, header, tensors):
    """Sleeps in steps, with a boundary and an event each."""
    for index in range(header["steps"]):
        context.report({"step": index}, [torch.tensor([index])])
        time.sleep(header["seconds"])
        context.check_cancelled()
    return {"done": header["steps"]}, []


def alone(context, header, tensors):
    """Works without the other ranks, longer on higher ranks, and meets them at the end."""
    deadline = time.monotonic() + header["seconds"] * (context.rank + 1)
    while time.monotonic() < deadline:
        context.stop_if_cancelled()
        context.progress("alone")
        time.sleep(0.01)
    context.check_cancelled()
    return {}, []


def total(context, header, tensors):
    """The sum over the ranks of each tensor in float64, through the model's process group."""
    sums = []
    for tensor in tensors:
        value = tensor.to(torch.float64, copy=True)
        dist.all_reduce(value, group=context.data_group)
        sums.append(value)
    return {"header": header, "same": len(set(context.gather(repr(sorted(header.items()))))) == 1}, sums


def raises(context, header, tensors):
    """Raises on some ranks; what the others do then is `others`: end, boundary, gather, or collective."""
    if context.rank in header["ranks"]:
        kind = header["kind"]
        if kind == "oom":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (simulated)")
        known = getattr(errors, kind, None) or getattr(sys.modules["builtins"], kind)
        raise known(f"{header.get('text', 'it went wrong')} on rank {context.rank}")
    if header["others"] == "boundary":
        for _ in range(3):
            context.check_cancelled()
    elif header["others"] == "gather":
        context.gather({"rank": context.rank})
    elif header["others"] == "collective":
        dist.all_reduce(torch.ones(1), group=context.data_group)
    return {}, []


def uneven(context, header, tensors):
    """Breaks the rule that all ranks meet equally many boundaries."""
    if context.rank == 0:
        context.check_cancelled()
    return {}, []


def dies(context, header, tensors):
    """One rank ends its process while the others wait for it."""
    if context.rank == header["rank"]:
        if header["how"] == "exit":
            print("last words of the rank", file=sys.stderr, flush=True)
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1), group=context.data_group)
    return {}, []


def hangs(context, header, tensors):
    """One rank never joins the collective that the others wait in."""
    context.progress("step 1")
    if context.rank == header["rank"]:
        time.sleep(3600)
    dist.all_reduce(torch.ones(1), group=context.data_group)
    return {}, []


def unusable_reply(context, header, tensors):
    """A reply that cannot be sent."""
    return {"value": float("nan")}, []


def surroundings(context, header, tensors):
    """What a rank sees of its environment."""
    names = header["names"]
    return {
        "env": context.gather({name: os.environ.get(name) for name in names}),
        "modules": [name for name in ("comfy", "nodes", "server", "diffusers") if name in sys.modules],
        "argv": context.gather(sys.argv[1]),
        "path": sys.path,
        "threads": torch.get_num_threads(),
        "package": sys.modules["comfy_tp"].__file__,
    }, []


def describe_models(context):
    return {"models": sorted(context.models), "extra": context.rank}


def remembers(context, header, tensors):
    """Keeps a tensor between commands, as a loaded model is kept; without one, the kept ones' sum over the ranks."""
    if tensors:
        context.models[header["key"]] = tensors[0]
        return {}, []
    value = context.models[header["key"]].double()
    dist.all_reduce(value, group=context.data_group)
    return {}, [value]


COMMANDS = {
    function.__name__: function
    for function in (
        steps,
        alone,
        total,
        raises,
        uneven,
        dies,
        hangs,
        unusable_reply,
        surroundings,
        remembers,
    )
}
