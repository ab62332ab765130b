"""How a check ended."""

from dataclasses import dataclass, replace
from typing import Literal

Status = Literal["ok", "failed", "skipped"]
NOT_REPORTED = "not reported by this driver"


@dataclass(frozen=True)
class Finding:
    """The result of one check, as `selftest.json` keeps it."""

    name: str
    status: Status
    found: str
    remedy: str | None = None
    """What to do about it; of a check that failed."""

    def named(self, name: str, remedy: str) -> "Finding":
        """The finding of this check, with its remedy where it failed and has none of its own."""
        return replace(self, name=name, remedy=(self.remedy or remedy) if self.status == "failed" else None)


def ok(found: str) -> Finding:
    return Finding("", "ok", found)


def failed(found: str, remedy: str | None = None) -> Finding:
    return Finding("", "failed", found, remedy)


def skipped(why: str) -> Finding:
    return Finding("", "skipped", why)


def judged(wrong: list[str], right: str) -> Finding:
    """Failed with all that is wrong; ok with `right` where nothing is."""
    return failed("; ".join(wrong)) if wrong else ok(right)
