"""The plugin as TensorBoard loads it, by the entry point `tensorboard_plugins`."""

from __future__ import annotations

import logging
import resource
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgspec
from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import wrappers
from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler

from gpurun.launcher.errors import GpurunError
from gpurun.launcher.tensorboard_plugin.answers.requested import MERGED_FILE, file_name, merges
from gpurun.launcher.tensorboard_plugin.logdir import Listing
from gpurun.launcher.tensorboard_plugin.routes import (
    ROUTES,
    Answer,
    Query,
    RequestRefused,
    TabServer,
    state_answer,
)
from gpurun.launcher.tensorboard_plugin.timeline.format import Index

logger = logging.getLogger(__name__)

MAX_AT_ONCE = 8
"""Requests that are answered at a time; others wait."""
MAX_WAIT_S = 10.0

Handler = Callable[[wrappers.Request], wrappers.Response]
Route = Callable[[TabServer, Query], Answer]
MIME_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
STATIC = Path(__file__).with_name("static")
CHUNK_BYTES = 1 << 20
LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})


class GpurunPlugin(base_plugin.TBPlugin):  # type: ignore[misc]
    """The tab GPURUN."""

    plugin_name = "gpurun"

    def __init__(self, context: Any) -> None:
        """`context`: what TensorBoard gives its plugins; `logdir` and `flags` are used."""
        super().__init__(context)
        self._server = TabServer(Listing(context.logdir))
        self._merges = merges()
        self._is_loopback = is_loopback(getattr(context, "flags", None))
        self._places = threading.BoundedSemaphore(MAX_AT_ONCE)

    def get_plugin_apps(self) -> Mapping[str, Any]:
        """All routes: those of the README, and one for each file of the page."""
        apps = {route: self._app(self._json(answer)) for route, answer in ROUTES.items()}
        apps["/trace/merged"] = self._app(self._merged)
        for route, path in static_files().items():
            apps[route] = self._app(partial(static_response, path))
        return apps

    def is_active(self) -> bool:
        """Whether the log directory has a run of gpurun, traces, or nothing that others could show:
        then ours says how a run is started."""
        return self._server.listing.any() or not self._server.listing.has_events()

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        return base_plugin.FrontendMetadata(es_module_path="/static/index.js", tab_name="GPURUN")

    def _json(self, route: Route) -> Handler:
        return lambda request: json_response(request, route(self._server, Query(request.args)))

    def _merged(self, request: wrappers.Request) -> wrappers.Response:
        """The merged trace as a download, or how far it is."""
        query = Query(request.args)
        traces, state = self._server.traces(query), self._server.index(query)
        if traces is None or not isinstance(state, Index):
            return json_response(request, state_answer(state))
        found = self._merges.get(traces, state, MERGED_FILE)
        if isinstance(found, str):
            return json_response(request, {"state": "broken", "problems": [{"message": found}]})
        if found is None:
            return json_response(request, {"state": "building", "problems": []})
        name = file_name(query.name("variant"))
        if query.flag("prepare"):
            return json_response(request, {"state": "ready", "bytes": found.stat().st_size, "file": name})
        return download_response(found, name)

    def _app(self, handler: Handler) -> Any:
        """A handler that says what is wrong as JSON, and waits where too many requests are under way."""

        @wrappers.Request.application
        def app(request: wrappers.Request) -> wrappers.Response:
            if request.method not in ("GET", "HEAD"):
                return json_response(request, {"error": "only GET is understood"}, 405)
            if (reason := refusal(request, self._is_loopback)) is not None:
                return json_response(request, {"error": reason}, 403)
            if not self._places.acquire(timeout=MAX_WAIT_S):
                return json_response(request, {"error": "busy: try again"}, 503)
            try:
                return handler(request)
            except RequestRefused as refused:
                return json_response(request, {"error": str(refused)}, refused.code)
            except OSError as error:
                logger.exception("a file of the log directory can't be read")
                return json_response(request, {"error": f"a file can't be read: {error.strerror}"}, 500)
            except (GpurunError, IndexError, ValueError):
                logger.exception("a record or a trace's index is damaged, or we are wrong about it")
                return json_response(
                    request, {"error": "this can't be shown; see the server's log for the reason"}, 500
                )
            finally:
                self._places.release()

        return app


def is_loopback(flags: Any) -> bool:
    """Whether TensorBoard, started with these flags, listens to this machine only; it does without any."""
    host = getattr(flags, "host", None)
    return not getattr(flags, "bind_all", False) and (not host or host in (*LOOPBACK_HOSTS, "::1"))


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
    return foreign_name(request) if is_loopback else None


def foreign_name(request: wrappers.Request) -> str | None:
    """Why a request that names another host is not answered; `None`: it names this machine."""
    name = request.host.rpartition(":")[0] if request.host.rpartition(":")[2].isdecimal() else request.host
    if name.lower() not in LOOPBACK_HOSTS:
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


def static_response(path: Path, request: wrappers.Request) -> wrappers.Response:
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


MOST_CONNECTIONS = 64
"""Each may make werkzeug hold a request of 10 MB."""
SILENT_S = 10.0
"""After which a connection that sends nothing is closed."""
EXPECTED = "gpurun.expected"
"""Key of a request's environment: to be called if it is one of the owner's."""


class BoundedServer(ThreadedWSGIServer):
    """A thread per connection, of so many at a time, so that no number of strangers keeps the owner waiting.

    Where there are too many, the oldest that has not sent a request of the owner's is closed.
    """

    most_connections = MOST_CONNECTIONS
    request_queue_size = 1024
    """Connections that the kernel keeps until they are looked at; of more, it lets whoever comes wait."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._most = min(self.most_connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)
        self._lock = threading.Lock()
        self._num_open = 0
        self._unknown: dict[socket.socket, None] = {}
        """Connections that may be anyone's, the oldest first."""
        handler: Any = self.RequestHandlerClass
        self.RequestHandlerClass = type("_Handler", (_Impatient, handler), {})
        app = self.app
        self.app = lambda environ, start: app({**environ, EXPECTED: self._expecting(environ)}, start)

    def _expecting(self, environ: Mapping[str, Any]) -> Callable[[], None]:
        return lambda: self._forget(environ["werkzeug.socket"])

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._unknown.pop(connection, None)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Called for each new connection, by one thread."""
        if not self._has_room():
            self.shutdown_request(request)
            return
        with self._lock:
            self._num_open += 1
            self._unknown[request] = None
        try:
            super().process_request(request, client_address)
        except BaseException:  # there is no further thread
            self._ended(request)
            raise

    def _has_room(self) -> bool:
        """Whether there is, now that the oldest connection is being closed if it was needed; its thread
        ends it, so that for a moment there may be more."""
        with self._lock:
            if self._num_open >= self._most and self._unknown:
                oldest = next(iter(self._unknown))
                del self._unknown[oldest]
                with suppress(OSError):  # it has gone
                    oldest.shutdown(socket.SHUT_RDWR)
                return self._num_open < 2 * self._most
            return self._num_open < self._most

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ended(request)

    def _ended(self, request: socket.socket) -> None:
        with self._lock:
            self._num_open -= 1
            self._unknown.pop(request, None)


class _Impatient(WSGIRequestHandler):
    """Gives up whoever sends nothing, which is worth no line."""

    timeout = SILENT_S

    def log(self, type: str, message: str, *args: Any) -> None:
        """Says nothing; an error in an answer is logged by the server."""
