"""The plugin as TensorBoard loads it, by the entry point `tensorboard_plugins`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from gpurun.launcher.tensorboard_plugin.answers.merged import Merges, file_name
from gpurun.launcher.tensorboard_plugin.http import (
    LOOPBACK_HOSTS,
    download_response,
    json_response,
    refusal,
    static_files,
    static_response,
)
from gpurun.launcher.tensorboard_plugin.logdir.listing import Listing
from gpurun.launcher.tensorboard_plugin.query import Query, Refused
from gpurun.launcher.tensorboard_plugin.routes import ROUTES, Answer, Server, state_answer
from gpurun.launcher.tensorboard_plugin.timeline.mapped import Index

logger = logging.getLogger(__name__)

MAX_AT_ONCE = 8
"""Requests that are answered at a time; others wait."""
MAX_WAIT_S = 10.0

Handler = Callable[[wrappers.Request], wrappers.Response]
Route = Callable[[Server, Query], Answer]


class GpurunPlugin(base_plugin.TBPlugin):  # type: ignore[misc]
    """The tab GPURUN."""

    plugin_name = "gpurun"

    def __init__(self, context: Any) -> None:
        """`context`: what TensorBoard gives its plugins; `logdir` and `flags` are used."""
        super().__init__(context)
        self._server = Server(Listing(context.logdir))
        self._merges = Merges()
        self._is_loopback = is_loopback(getattr(context, "flags", None))
        self._places = threading.BoundedSemaphore(MAX_AT_ONCE)

    def get_plugin_apps(self) -> Mapping[str, Any]:
        """All routes: those of the README, and one for each file of the page."""
        apps = {route: self._app(self._json(answer)) for route, answer in ROUTES.items()}
        apps["/trace/merged"] = self._app(self._merged)
        for route, path in static_files().items():
            apps[route] = self._app(_static(path))
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
        found = self._merges.get(traces, state)
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
            except Refused as refused:
                return json_response(request, {"error": str(refused)}, refused.code)
            except OSError as error:
                logger.exception("a file of the log directory can't be read")
                return json_response(request, {"error": f"a file can't be read: {error.strerror}"}, 500)
            except (IndexError, ValueError):
                logger.exception("a trace's index is damaged, or we are wrong about it")
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


def _static(path: Path) -> Handler:
    return lambda request: static_response(request, path)
