"""Makes a recorded run small enough for the repository.

`python docs/trim_run.py RUN docs/runs/NAME [VARIANT …]` keeps what reports and the tab read, the traces of
the named variants only, and no path or host name of the machine.
"""

import gzip
import json
import os
import re
import sys
from pathlib import Path

DROPPED = (
    "events.out.tfevents*",
    "log/*",
    "rendezvous*",
    "control/*",
    "captures/*",
    "screening",
    "report.html",
    "trace.json",
)
HOST = "example"


def main() -> None:
    run, target, traced = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    words = machine_words(run)
    for file in sorted(path for path in run.rglob("*") if path.is_file()):
        relative = file.relative_to(run)
        is_trace = file.name.endswith(".pt.trace.json.gz")
        is_dropped = relative.parts[0] in DROPPED or any(map(relative.match, DROPPED))
        if is_dropped or (is_trace and file.parent.name not in traced):
            continue
        path = target / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_trace:
            text = json.dumps(json.loads(cleaned(gzip.decompress(file.read_bytes()).decode(), words)))
            path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
        else:
            path.write_text(cleaned(file.read_text(encoding="utf-8"), words), encoding="utf-8")
    print(f"{target}: {sum(path.stat().st_size for path in target.rglob('*') if path.is_file()) >> 10} KiB")


def machine_words(run: Path) -> dict[str, str]:
    """What in the files identifies the machine, and what replaces it; longer ones first."""
    host = json.loads((run / "host.json").read_text())
    invocation = json.loads((run / "invocation.json").read_text())
    directory = str(Path(invocation["job_file"]).parent)
    words = {str(run.absolute()): "runs/example", directory: "examples"}
    if (run / "code.json").exists():
        words[json.loads((run / "code.json").read_text())["root"]] = "example"
    words |= {f'"{host[key]}"': f'"{HOST}"' for key in ("hostname", "kernel") if host.get(key)}
    return dict(sorted(words.items(), key=lambda pair: -len(pair[0])))


def cleaned(text: str, words: dict[str, str]) -> str:
    for word, other in words.items():
        text = text.replace(word, other)
    return re.sub(r"/tmp/[\w./-]+", f"{os.sep}tmp{os.sep}example", text)


if __name__ == "__main__":
    main()
