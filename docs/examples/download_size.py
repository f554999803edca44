"""Print what ``pip install`` with these arguments would download, and how large that is. Exit code 1: nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor


def size_of(url: str) -> int | None:
    """In bytes; 0 for a file of this machine, None where the server does not say."""
    if url.startswith("file:"):
        return 0
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=10) as answer:
            return int(answer.headers["Content-Length"])
    except (OSError, TypeError, ValueError):
        return None


def megabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def what_is_missing(arguments: list[str]) -> str:
    """One line; pip's own answer of what it would install, with sizes of the servers."""
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", *arguments]
    done = subprocess.run(pip, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        urls = {item["metadata"]["name"]: item["download_info"]["url"] for item in json.loads(done.stdout)["install"]}
    except (ValueError, KeyError):
        return "this pip can't say how large the download is; torch with CUDA is about 3 GB, torch for CPUs 200 MB"
    editable = [name for name, url in urls.items() if os.path.isdir(url.removeprefix("file://"))]
    names = [name for name in urls if name not in editable]
    if not names:
        return ""
    with ThreadPoolExecutor(16) as pool:
        sizes = dict(zip(names, pool.map(size_of, [urls[name] for name in names]), strict=True))
    known = {name: size for name, size in sizes.items() if size}
    text = f"to download: {len(names)} packages, {megabytes(sum(known.values()))}"
    if largest := sorted(known, key=lambda name: -known[name])[:3]:
        text += f" (the largest: {', '.join(f'{name} {megabytes(known[name])}' for name in largest)})"
    if unknown := [name for name in names if sizes[name] is None]:
        text += f", and of unknown size: {', '.join(unknown[:5])}{' …' if len(unknown) > 5 else ''}"
    return text


if __name__ == "__main__":
    print(f"setup: asking pip what {' '.join(sys.argv[1:])} needs", flush=True)
    line = what_is_missing(sys.argv[1:])
    print(f"setup: {line or 'nothing to download'}", flush=True)
    sys.exit(not line)
