"""A comparison that was recorded once, of variants that differ in all that a report shows."""

from pathlib import Path

import msgspec

from gpurun.launcher.compare.model import Comparison

SAMPLE = Path(__file__).parent / "data" / "comparison.json"
COMPARISON = msgspec.json.decode(SAMPLE.read_bytes(), type=Comparison)
