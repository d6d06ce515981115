"""Queue an API workflow on a running ComfyUI, follow its progress, save its picture.

python run.py flux2_text_to_image_tp_sampler.json picture.png http://127.0.0.1:8188
"""

import asyncio
import json
import sys
import uuid

import aiohttp  # ComfyUI brings it


async def run(workflow: str, picture: str, url: str = "http://127.0.0.1:8188") -> None:
    client = uuid.uuid4().hex
    async with aiohttp.ClientSession(url) as http:
        async with http.ws_connect(f"/ws?clientId={client}", max_msg_size=0) as events:
            with open(workflow, encoding="utf-8") as file:
                queued = {"prompt": json.load(file), "client_id": client}
            async with http.post("/prompt", json=queued) as answer:
                if answer.status != 200:
                    sys.exit(f"ComfyUI refused the workflow: {await answer.text()}")
            async for message in events:
                if message.type is not aiohttp.WSMsgType.TEXT:
                    continue  # a preview picture
                event, data = (json.loads(message.data).get(key) for key in ("type", "data"))
                if event == "progress":
                    print(f"node {data['node']}: {data['value']}/{data['max']}")
                elif event in ("execution_error", "execution_interrupted"):
                    sys.exit(data.get("exception_message", "The prompt was cancelled.").strip())
                elif event == "executed" and (data["output"] or {}).get("images"):
                    image = data["output"]["images"][0]
                elif event == "execution_success":
                    break
            else:
                sys.exit("ComfyUI closed the connection.")
        async with http.get("/view", params=image) as answer:
            with open(picture, "wb") as file:
                file.write(await answer.read())
    print(f"saved {picture}")


asyncio.run(run(*sys.argv[1:]))
