"""Answers as HTTP has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
from tensorboard.backend import http_util
from werkzeug import wrappers

MIME_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
STATIC = Path(__file__).with_name("static")
CHUNK_BYTES = 1 << 20


def json_response(request: wrappers.Request, answer: Any, code: int = 200) -> wrappers.Response:
    """The answer as JSON; one with a `version` that the page has already is left out (304)."""
    version = answer.get("version") if isinstance(answer, dict) else None
    headers = []
    if code == 200 and version is not None and answer.get("state") is None:
        tag = f'"{version}"'
        headers.append(("ETag", tag))
        if tag in (request.headers.get("If-None-Match") or "").split(", "):
            return wrappers.Response(status=304, headers=[*headers, ("Cache-Control", "no-cache")])
    content = msgspec.json.encode(answer)
    found: wrappers.Response = http_util.Respond(
        request, content, "application/json", code=code, headers=headers
    )
    return found


def static_files() -> dict[str, Path]:
    """The page's files by route: nothing else can be asked for."""
    files = [path for path in STATIC.rglob("*") if path.suffix in MIME_TYPES and path.is_file()]
    return {f"/static/{path.relative_to(STATIC).as_posix()}": path for path in sorted(files)}


def static_response(request: wrappers.Request, path: Path) -> wrappers.Response:
    """One of the page's own files."""
    found: wrappers.Response = http_util.Respond(request, path.read_bytes(), MIME_TYPES[path.suffix])
    return found


def download_response(path: Path, name: str) -> wrappers.Response:
    """A file as a download, piece by piece, however large it is."""
    file = path.open("rb")
    headers = [
        ("Content-Disposition", f'attachment; filename="{name}"'),
        ("Content-Length", str(path.stat().st_size)),
        ("X-Content-Type-Options", "nosniff"),
        ("Cache-Control", "no-cache, must-revalidate"),
    ]
    response = wrappers.Response(_pieces(file), headers=headers, content_type="application/gzip")
    response.call_on_close(file.close)
    return response


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    while piece := file.read(CHUNK_BYTES):
        yield piece
