"""PyTorch's page for memory snapshots, with nothing loaded from elsewhere.

PyTorch's wheels lack the page's scripts: `python -m tests.torch.memory_viz` takes them from Debian's source package of
PyTorch. The page loads d3, which mpld3 has.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(sys.prefix) / "share" / "memory_viz"
HOW = "`make setup-torch` on a Debian system installs it"
_SOURCES = (
    "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie main\n"
)
_ADDRESS = "http://localhost/"
_PARTS = ("axisLeft", "scaleLinear", "zoom", "zoomIdentity", "brushX")  # what the page loads of d3's parts


def missing() -> str:
    """What has to be installed before the page can be opened; empty: nothing."""
    if not (FOLDER / "MemoryViz.js").exists():
        return f"needs MemoryViz.js, which PyTorch's wheels lack: {HOW}"
    return "" if importlib.util.find_spec("mpld3") else f"needs mpld3, for its d3: {HOW}"


def install() -> None:
    """Download Debian's source package of PyTorch (27 MB) and keep the scripts of the page."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sources.list").write_text(_SOURCES)
        for part in ("state/lists/partial", "cache/archives/partial"):
            (Path(folder) / part).mkdir(parents=True)
        places = {"Etc::sourcelist": "sources.list", "Etc::sourceparts": "none", "State": "state", "Cache": "cache"}
        told = [f"Dir::{key}={folder}/{path}" for key, path in places.items()]
        options = [text for each in (*told, "APT::Sandbox::User=root") for text in ("-o", each)]
        for command in ("update", "--download-only source pytorch"):
            subprocess.run(["apt-get", "-qq", *options, *command.split()], cwd=folder, check=True)
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tarfile.open(next(Path(folder).glob("pytorch_*.orig.tar.xz"))) as archive:
            for member in archive:
                if re.search(r"/torch/utils/viz/\w+\.js$", member.name) and (file := archive.extractfile(member)):
                    (FOLDER / Path(member.name).name).write_bytes(file.read())


def d3_module() -> str:
    """d3 as the module that the page takes it for. `event` is a variable of d3's that changes."""
    mpld3 = importlib.util.find_spec("mpld3")
    assert mpld3 is not None and mpld3.origin is not None
    d3 = (Path(mpld3.origin).parent / "js" / "d3.v5.min.js").read_text()
    used = {*re.findall(r"\bd3\.(\w+)", (FOLDER / "MemoryViz.js").read_text()), *_PARTS} - {"event"}
    return f"""
        export let event = null;
        const d3 = {{}};
        Object.defineProperty(d3, "event", {{ get: () => event, set: (each) => {{ event = each; }} }});
        (function (exports, module) {{ {d3} }})(d3, {{}});
        export const {{ {", ".join(sorted(used))} }} = d3;
    """


def serve(page: Any, text: str, errors: list[str]) -> None:
    """Show a page that PyTorch wrote. What it asks for comes from this machine; anything else is an error."""

    def answer(route: Any) -> None:
        url = route.request.url
        shared = {"content_type": "text/javascript", "headers": {"access-control-allow-origin": "*"}}
        if url == _ADDRESS:
            route.fulfill(body=text, content_type="text/html")
        elif re.search(r"/torch/utils/viz/\w+\.js$", url):
            route.fulfill(path=FOLDER / url.rpartition("/")[2], **shared)
        elif url.endswith("/d3@5"):
            route.fulfill(body=d3_module(), **shared)
        elif re.search(r"/d3-\w+@1$", url):
            route.fulfill(body=f'export * from "{url.rpartition("/")[0]}/d3@5";', **shared)
        else:
            errors.append(f"asked for {url}")
            route.abort()

    page.route("**/*", answer)
    page.goto(_ADDRESS)


if __name__ == "__main__":
    try:
        install()
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"the tests that open PyTorch's page of snapshots are skipped: {error}")
