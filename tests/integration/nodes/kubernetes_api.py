"""As much of a Kubernetes API server as `kubectl` needs to create, look after and delete our objects.

It keeps them in memory, refuses what the published schema doesn't know, and makes a Job's Pods at once.
Source: kubernetes.io, "Kubernetes API Concepts" and "Job".
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import yaml

VERSION = "1.37"
GROUPS = {
    "": ("v1", {"Service": "services", "Secret": "secrets", "Pod": "pods"}),
    "batch": ("v1", {"Job": "jobs"}),
    "trainer.kubeflow.org": ("v1alpha1", {"TrainJob": "trainjobs"}),
}
"""API group → its version, and the kinds in it with the names of their resources."""
Object = dict[str, Any]


class Cluster(ThreadingHTTPServer):
    """Objects by resource and name, of one namespace."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[tuple[str, str], Object] = {}
        self.namespaces: set[str] = set()

    def create(self, resource: str, created: Object) -> None:
        """Adds it, and what its controller makes of it."""
        name = created["metadata"]["name"]
        created["metadata"]["uid"] = f"uid-{name}"
        self.objects[resource, name] = created
        for pod in pods_of(created):
            self.objects["pods", pod["metadata"]["name"]] = pod

    def delete(self, resource: str, name: str) -> Object:
        """Removes it, and the Pods that it owns."""
        deleted = self.objects.pop((resource, name))
        for key, pod in list(self.objects.items()):
            if pod["metadata"].get("ownerReferences") == [{"uid": deleted["metadata"]["uid"]}]:
                del self.objects[key]
        return deleted

    def labelled(self, resource: str, selector: str) -> list[Object]:
        """Those with all labels of `name=value,…`."""
        wanted = set(filter(None, selector.split(",")))
        return [
            listed
            for (kind, _), listed in self.objects.items()
            if kind == resource
            and wanted <= {f"{k}={v}" for k, v in listed["metadata"].get("labels", {}).items()}
        ]


def pods_of(owner_object: Object) -> Iterator[Object]:
    """The Pods that the controllers make: of a Job, and of the Jobs of a TrainJob."""
    name, owner = owner_object["metadata"]["name"], [{"uid": owner_object["metadata"]["uid"]}]
    match owner_object["kind"]:
        case "Job":
            count, of = owner_object["spec"]["completions"], "batch.kubernetes.io/job-name"
        case "TrainJob":
            count, of = owner_object["spec"]["trainer"]["numNodes"], "jobset.sigs.k8s.io/jobset-name"
        case _:
            return
    for index in range(count):
        labels = {of: name, "batch.kubernetes.io/job-completion-index": str(index)}
        metadata = {
            "name": f"{name}-{index}-x",
            "namespace": "ml",
            "labels": labels,
            "ownerReferences": owner,
        }
        spec = {"containers": [{"name": "gpurun"}]}
        yield {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata,
            "spec": spec,
            "status": {"phase": "Running"},
        }


class Handler(BaseHTTPRequestHandler):
    """A request of `kubectl`."""

    server: Cluster

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        parts, query = url.path.strip("/").split("/"), parse_qs(url.query)
        found = discovery(parts)
        if found or "namespaces" not in parts:
            return self.answer_with(found)
        resource, *names = below_namespace(parts)
        if names[1:] == ["log"]:
            return self.answer(200, f"hello from {names[0]}\n")
        if names:
            return self.answer_with(self.server.objects.get((resource, names[0])))
        items = self.server.labelled(resource, query.get("labelSelector", [""])[0])
        return self.answer(200, {"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": items})

    def do_POST(self) -> None:
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        parts = urlsplit(self.path).path.strip("/").split("/")
        self.server.namespaces.add(parts[parts.index("namespaces") + 1])
        try:
            if "." not in sent["apiVersion"]:
                kubernetes_validate.validate(sent, VERSION, strict=True)
        except kubernetes_validate.ValidationError as wrong:
            return self.answer(422, status(422, str(wrong).splitlines()[0]))
        (resource,) = below_namespace(parts)
        self.server.create(resource, sent)
        return self.answer(201, sent)

    def do_DELETE(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        resource, name = below_namespace(urlsplit(self.path).path.strip("/").split("/"))
        self.answer_with(
            self.server.delete(resource, name) if (resource, name) in self.server.objects else None
        )

    def answer_with(self, found: Object | None) -> None:
        self.answer(200, found) if found else self.answer(404, status(404, "not found"))

    def answer(self, code: int, body: Object | str) -> None:
        text = body if isinstance(body, str) else json.dumps(body)
        self.send_response(code)
        self.send_header("Content-Type", "text/plain" if isinstance(body, str) else "application/json")
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


def status(code: int, message: str) -> Object:
    reason = {404: "NotFound", 422: "Invalid"}[code]
    return {
        "apiVersion": "v1",
        "kind": "Status",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
    }


def below_namespace(parts: list[str]) -> list[str]:
    """Of `/api/v1/namespaces/NAMESPACE/pods/NAME/log`: `pods`, `NAME`, `log`."""
    return parts[parts.index("namespaces") + 2 :]


def discovery(parts: list[str]) -> Object | None:
    """What there is in the API."""
    match parts:
        case ["version"]:
            return {"major": "1", "minor": VERSION.split(".")[1], "gitVersion": f"v{VERSION}.0"}
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ["apis"]:
            groups = [group_of(name, version) for name, (version, _) in GROUPS.items() if name]
            return {"apiVersion": "v1", "kind": "APIGroupList", "groups": groups}
        case ["api", _]:
            return resources_of("")
        case ["apis", group, _]:
            return resources_of(group)
    return None


def group_of(name: str, version: str) -> Object:
    served = {"groupVersion": f"{name}/{version}", "version": version}
    return {"name": name, "versions": [served], "preferredVersion": served}


def resources_of(group: str) -> Object:
    version, kinds = GROUPS[group]
    verbs = ["create", "delete", "get", "list"]
    resources = [
        {"name": name, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
        for kind, name in kinds.items()
    ]
    full = f"{group}/{version}" if group else version
    return {"apiVersion": "v1", "kind": "APIResourceList", "groupVersion": full, "resources": resources}


@contextmanager
def cluster(directory: Path) -> Iterator[tuple[Cluster, Path]]:
    """A server, and the file with its address for `kubectl`."""
    server = Cluster()
    thread = Thread(target=server.serve_forever)
    thread.start()
    config = directory / "kubeconfig"
    address = f"http://127.0.0.1:{server.server_address[1]}"
    config.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
                "clusters": [{"name": "here", "cluster": {"server": address}}],
                "users": [{"name": "me", "user": {}}],
            }
        )
    )
    try:
        yield server, config
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
