"""YAML in, a checked `JobSpec` out; every mistake of a file with its line and column."""

import os

# pydantic would search all installed packages for plugins, at every start; we have none, and it takes 16 ms.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "true")
