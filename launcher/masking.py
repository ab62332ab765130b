"""Secrets in environment variables: known by their names, shown as masks, revealed to the ranks alone.

A job's `env` holds masks from the moment it is read, so that no plan, record, id, report or message can hold
the value. What starts the ranks puts the value in its place.
"""

import os
import re
from collections.abc import Iterable, Mapping
from functools import cache

from gpurun.launcher.errors import SpecError

_NAME = re.compile(
    r"(^|_)(KEYS?|SECRETS?|PASS|PASSPHRASE|CREDENTIALS?|CREDS|AUTH|PAT|JWT|OTP|COOKIE|BEARER|DSN|WEBHOOK)(_|$)"
    r"|TOKEN(_|$)|(API|ACCESS|PRIVATE|SECRET)KEY|SECRET(_|$)|PASSW|CONNECTION_?STRING|_PWD(_|$)",
    re.IGNORECASE,
)
_IN_ADDRESS = re.compile(r"\w://[^/\s@]*:[^/\s@]+@")
"""A password in an address, such as `http://me:secret@proxy:3128`."""
_MASK = re.compile(r"masked:[0-9a-f]{6}")
SHORT, SHORTEST = 8, 4
"""Characters; a value shorter than the one is looked for as a word, and one shorter than the other not at
all: too much else would be masked."""


def is_secret(name: str) -> bool:
    """Whether a variable holds a secret, by its name: `HF_TOKEN`, `WANDB_API_KEY`, `PGPASSWORD`."""
    return _NAME.search(name) is not None


def holds_secret(name: str, value: str) -> bool:
    """Whether a variable holds a secret, by its name or since its value is an address with a password."""
    return is_secret(name) or _IN_ADDRESS.search(value) is not None


def masked(name: str, value: str) -> str:
    """`masked:3fa2b1` for the value of a secret, a mask as it is, and the value itself where it is no secret.

    The digits differ for another value, so that `--resume` notices it. They are few, and of a function that
    takes long, so that a value can't be found by trying.
    """
    if not holds_secret(name, value) or is_mask(value):
        return value
    return f"masked:{_digits(name, value)}"


def is_mask(value: str) -> bool:
    return _MASK.fullmatch(value) is not None


@cache
def _digits(name: str, value: str) -> str:
    import hashlib  # loads OpenSSL, which most jobs have no use for

    return hashlib.scrypt(
        value.encode("utf-8", "replace"), salt=name.encode(), n=1 << 14, r=8, p=1, dklen=3
    ).hex()


Secrets = Mapping[str, str]
"""Values by mask."""


def revealed(env: Mapping[str, str], secrets: Secrets) -> dict[str, str]:
    """The environment as a rank gets it. The command's own may have a value of which only the mask is known.

    Raises:
        SpecError: it hasn't.
    """
    return {name: _value(name, value, secrets) if is_mask(value) else value for name, value in env.items()}


def _value(name: str, mask: str, secrets: Secrets) -> str:
    own = os.environ.get(name)
    if mask in secrets:
        return secrets[mask]
    if own is not None and masked(name, own) == mask:
        return own
    raise SpecError(
        f"the job has only the mask of {name}; no record holds the value\n"
        f"    export the same value, {name}=…, or write another one into the job"
    )


def hidden(text: str, variables: Iterable[tuple[str, str]]) -> str:
    """The text with masks in place of the secrets among these variables."""
    for name, value in variables:
        if len(value) >= SHORTEST and not is_mask(value) and holds_secret(name, value):
            for spelling in _spellings(value):
                if spelling in text:
                    text = _replaced(text, spelling, masked(name, value))
    return text


@cache
def _spellings(value: str) -> tuple[str, ...]:
    """A value as it is, as Python and JSON quote it and as addresses do, and by line: logs are cut up."""
    import json
    from urllib.parse import quote

    quoted = (repr(value)[1:-1], json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1])
    lines = (line.strip() for line in value.splitlines() if len(line.strip()) >= SHORT)
    return tuple(dict.fromkeys((value, *quoted, quote(value), quote(value, safe=""), *lines)))


def _replaced(text: str, value: str, mask: str) -> str:
    if len(value) >= SHORT:
        return text.replace(value, mask)
    return re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", mask, text)
