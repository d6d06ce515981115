"""Small git repositories with a tree that is a ComfyUI as far as the cache looks, and that starts like one."""

from __future__ import annotations

import os
import subprocess
import zipfile
import zlib
from pathlib import Path

# Answers what a harness asks first, with the interpreter and the frontend that it found.
MAIN = """
import http.server, importlib.metadata, json, sys

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        frontend = importlib.metadata.version("comfyui_frontend_package")
        self.wfile.write(json.dumps({"python": sys.executable, "frontend": frontend}).encode())

    def log_message(self, *words):
        pass

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Answer).serve_forever()
"""
LARGE = "comfy/text_encoders/tokenizer.json"
REQUIREMENTS = "torch\ntorchvision>=0.1\ntorchaudio\n\n# its own\ncomfyui-frontend-package==9.9.9\n"


def tree_files(version: str, **changes: str | None) -> dict[str, str]:
    """Path -> content of a small tree; a change of None leaves a file out."""
    files: dict[str, str | None] = {
        "main.py": MAIN,
        "comfyui_version.py": f'__version__ = "{version}"\n',
        "requirements.txt": REQUIREMENTS,
        "comfy/__init__.py": "",
        "comfy/ldm/models/autoencoder.py": "WIDTH = 128\n",
        # Sorts between the file and the folder of its name only by git's own order.
        "comfy-notes.txt": "of this release\n",
        LARGE: "{}\n",
        **{name: "# stock\n" for name in ("nodes.py", "execution.py", "server.py", "folder_paths.py")},
        **changes,
    }
    return {path: content for path, content in files.items() if content is not None}


def commit(repository: Path, files: dict[str, str], *, tag: str | None = None) -> str:
    """Commit exactly these files, in a new repository where there is none yet; returns the commit's hash."""
    if not repository.exists():
        repository.mkdir(parents=True)
        git(repository, "init", "--quiet")
    git(repository, "rm", "-r", "-q", "--ignore-unmatch", ".")
    for name, content in files.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(content)
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--allow-empty", "-m", "A release")
    if tag is not None:
        git(repository, "tag", "-a", tag, "-m", tag)
    return git(repository, "rev-parse", "HEAD")


def git(repository: Path, *arguments: str) -> str:
    """Run git in a repository, as nobody in particular."""
    own = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(repository), *own, *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def object_file(repository: Path, name: str) -> Path:
    """Where git keeps an object of `HEAD`: a file by its path in the tree, ``""`` for the tree itself."""
    found = git(repository, "rev-parse", f"HEAD:{name}")
    return repository / ".git" / "objects" / found[:2] / found[2:]


def replace_object(file: Path, kind: str, content: bytes) -> None:
    """Put another sound object under an object's name."""
    file.chmod(0o644)
    file.write_bytes(zlib.compress(f"{kind} {len(content)}\0".encode() + content))


def shell_for_ssh(folder: Path) -> str:
    """A stand-in for ssh, for GIT_SSH_COMMAND: it runs on this machine what git asks the other one to run."""
    script = folder / "ssh"
    script.write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')
    script.chmod(0o755)
    return str(script)


def wheel(folder: Path, name: str, version: str, *needs: str) -> None:
    """A wheel with an empty module."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {need}" for need in needs]
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{module}/__init__.py", "")
        archive.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"{module}/__init__.py,,\n")


def only_from(folder: Path) -> dict[str, str]:
    """The environment in which pip knows no other packages than the wheels of a folder."""
    return {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}
