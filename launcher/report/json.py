"""The comparison as JSON: `--json`, and the content of `comparison.json`."""

import msgspec

from launcher.compare.model import Comparison


def render_json(comparison: Comparison) -> str:
    """`comparison` as its schema describes it; NaN and infinity become `null`."""
    return msgspec.json.format(msgspec.json.encode(comparison), indent=2).decode()
