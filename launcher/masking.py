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
    r"(^|_)(TOKEN|KEYS?|SECRETS?|PASS|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH)(_|$)|PASSWORD|_PWD(_|$)",
    re.IGNORECASE,
)
_MASK = re.compile(r"masked:[0-9a-f]{6}")
SHORT = 8
"""Characters; a shorter value would be found within other words."""


def is_secret(name: str) -> bool:
    """Whether a variable holds a secret, by its name: `HF_TOKEN`, `WANDB_API_KEY`, `PGPASSWORD`."""
    return _NAME.search(name) is not None


def masked(name: str, value: str) -> str:
    """`masked:3fa2b1` for the value of a secret, a mask as it is, and the value itself where it is no secret.

    The digits differ for another value, so that `--resume` notices it. They are few, and of a function that
    takes long, so that a value can't be found by trying.
    """
    if not is_secret(name) or is_mask(value):
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
        if len(value) >= SHORT and value in text and not is_mask(value) and is_secret(name):
            text = text.replace(value, masked(name, value))
    return text
