"""Queue an API workflow on a running ComfyUI, follow its progress, save its first picture.

python run.py flux2_text_to_image_tp_sampler.json picture.png http://127.0.0.1:8188
"""

import asyncio
import json
import sys
import uuid
from pathlib import Path

import aiohttp  # ComfyUI brings it


async def run(workflow: str, picture: str, url: str = "http://127.0.0.1:8188") -> None:
    queued = {"prompt": json.loads(Path(workflow).read_text("utf-8")), "client_id": uuid.uuid4().hex}
    follow = f"/ws?clientId={queued['client_id']}"
    async with aiohttp.ClientSession(url) as http, http.ws_connect(follow, max_msg_size=0) as events:
        async with http.post("/prompt", json=queued) as answer:
            if answer.status != 200:
                sys.exit(f"ComfyUI refused the workflow: {await answer.text()}")
        async for message in events:  # text, and preview pictures between
            match message.type is aiohttp.WSMsgType.TEXT and json.loads(message.data):
                case {"type": "progress", "data": data}:
                    print(f"node {data['node']}: {data['value']}/{data['max']}")
                case {"type": "executed", "data": {"output": {"images": [image, *_]}}}:
                    Path(picture).write_bytes(await (await http.get("/view", params=image)).read())
                    return print(f"saved {picture}")
                case {"type": "execution_error" | "execution_interrupted" | "execution_success", "data": end}:
                    sys.exit(end.get("exception_message", "The prompt ended without a picture.").strip())
        sys.exit("ComfyUI closed the connection.")


asyncio.run(run(*sys.argv[1:]))
