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


LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})


def refusal(request: wrappers.Request, is_loopback: bool) -> str | None:
    """Why a request that any web site could have made is not answered; `None`: it is.

    A site whose name comes to mean this machine (DNS rebinding) sends that name; one that has the browser ask
    for something here has no access to the answer, but the work would be done.

    Args:
        request: any.
        is_loopback: whether the server listens to this machine only.
    """
    site = request.headers.get("Sec-Fetch-Site", "none")  # older browsers, and programs, send none
    if site not in ("same-origin", "none"):
        return f"a page of another origin asked ({site}); only TensorBoard's own page may"
    name = request.host.rpartition(":")[0] if request.host.rpartition(":")[2].isdecimal() else request.host
    if is_loopback and name.lower() not in LOOPBACK_HOSTS:
        return f"this TensorBoard serves localhost only, not {name}; for others start it with --bind_all"
    return None


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
