"""Secrets in environment variables: known by their names, shown as masks, revealed to the ranks alone.

A job's `env` holds masks from the moment it is read, so that no plan, record, id, report or message can hold
the value. What starts the ranks puts the value in its place.
"""

import os
import re
from collections.abc import Iterable, Mapping
from functools import cache

from gpurun.launcher.errors import SpecError

_WORD = re.compile(
    r".*(TOKEN|SECRET|CREDENTIAL|COOKIE|PASSPHRASE|PASSCODE|PINCODE|WEBHOOK|DSN|KEY|PWD|PSWD)S?"
    r"|.*(PASS|AUTH|OTP)|.*(PASSW|(API|ACCESS|PRIVATE|SECRET)KEY).*"
    r"|AUTHORI[SZ]ATION|AUTHENTICATION|CREDS?|PAT|JWT|BEARER|SAS|MNEMONIC"
)
"""A word of a name, in capitals and without the number or version at its end, that says secret."""
_TOGETHER = re.compile(
    r"CONN(ECTION)?_?STRING|AWS_ACCESS|(SEED|ENCRYPTION|RECOVERY|BACKUP|WALLET)_?PHRASE"
    r"|(^|_)(SSH|RSA|DSA|ECDSA|ED|GPG|PGP|SSL|TLS|DEPLOY)_PRIVATE$"
)
"""Words that say secret only next to each other."""
_AT_END = re.compile("PIN|SIGNATURES?")
"""Words that say secret only as the last word: `PIN_MEMORY` says none, nor does `CPU_PIN`."""
_PINNED = frozenset(
    {"CORE", "CORES", "CPU", "CPUS", "GPU", "MEM", "MEMORY", "NUMA", "PROC", "THREAD", "THREADS"}
)
"""Words for what is pinned to a place, which is no secret."""
_ORDINARY = re.compile(
    r"PWD|OLDPWD|(COM|BY|SUR|TRES|OVER|UNDER|ENCOM|MULTI|LOW|HIGH|BAND)PASS"
    r"|(MON|TUR|DON|WHIS|HOC|JOC|LAC|HOT|PUB|PUBLIC)KEYS?|(N|NUM|MAX|MIN|TOTAL)TOKENS"
)
"""Words that end as those do."""
_COUNTED = re.compile(
    "BATCH|BATCHED|CONTEXT|COUNT|EVAL|LEN|LENGTH|LIMIT|MAX|MIN|N|NEW|NUM|NUMBER|PAD|PER|PROMPT|SEQ|SPECIAL"
    "|STEP|STOP|TOTAL|TRAIN|VAL|WARMUP"
)
"""Words with which TOKENS are those of a text: `MAX_TOKENS`."""
_WORDS = re.compile(r"[^\W\d_]+\d*")
_NUMBER = re.compile(r"V?\d+$")
_CAMEL_CASE = re.compile(r"(?<=[a-z\d])(?=[A-Z])")
_IN_VALUE = re.compile(
    r"\w://[^/\s@:]*:(?P<password>[^\s@]{1,4096})@"
    r"|\w://(?P<user>[^/\s@:]{20,})@"
    r"|\w://[^\s?]{1,4096}\?\S{0,4096}?(?:token|key|sig|signature|secret|password)=(?P<asked>[^&\s]+)"
    r"|(?:^|;)\s*(?:AccountKey|SharedAccessKey|SharedAccessSignature|Password|Pwd)\s*=\s*(?P<part>[^;]+)"
    r"|\b(?:machine|login)\s{1,99}\S{1,999}\s{1,99}password\s{1,99}(?P<entry>\S+)"
    r"|\bauthorization[\"']?\s{0,9}[:=]\s{0,9}[\"']?(?:[a-z]{1,20}\s{1,9})?(?P<header>[^\s\"']{6,})"
    r"|\bbearer\s{1,9}(?P<bearer>[\w.~+/=-]{16,})"
    r"|//hooks\.slack\.com/[a-z]{1,20}/(?P<slack>[^\s?]+)"
    r"|//discord(?:app)?\.com/api/webhooks/(?P<discord>[^\s?]+)"
    r"|(?-i:\b(?P<known>gh[oprsu]_[A-Za-z\d]{16,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[a-z]-[\w-]{8,}"
    r"|hf_[A-Za-z\d]{30,}|sk-[\w-]{32,}|AKIA[A-Z\d]{16}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+))"
    r"|(?-i:-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----\s(?P<pem>[^-]+))",
    re.IGNORECASE,
)
"""A secret in an address, a connection string, a header or an entry of a `.netrc`, or one that its first
letters show: `http://me:secret@proxy:3128`, `ghp_…`; a slash may be part of it."""
_MASK = re.compile(r"masked:[0-9a-f]{6}")
SHORT, SHORTEST = 8, 4
"""Characters; a value shorter than the one is looked for as a word, and one shorter than the other not at
all: too much else would be masked."""


@cache
def is_secret(name: str) -> bool:
    """Whether a variable holds a secret, by its name: `HF_TOKEN`, `WANDB_API_KEY`, `PGPASSWORD`."""
    words = _WORDS.findall(_CAMEL_CASE.sub("_", name))
    found = [_NUMBER.sub("", word.upper()) for word in words]
    at_end = bool(found) and _AT_END.fullmatch(found[-1]) is not None and _PINNED.isdisjoint(found)
    together = _TOGETHER.search("_".join(found)) is not None
    return at_end or together or any(_says_secret(word, found) for word in found)


def _says_secret(word: str, words: list[str]) -> bool:
    if word == "PWD":
        return len(words) > 1 and words[0] != "PWD"
    if word == "TOKENS" and any(map(_COUNTED.fullmatch, words)):
        return False
    return _WORD.fullmatch(word) is not None and _ORDINARY.fullmatch(word) is None


def holds_secret(name: str, value: str) -> bool:
    """Whether a variable holds a secret, by its name or since its value is, or has, one."""
    return is_secret(name) or _IN_VALUE.search(value) is not None


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
    """A value as it is, as Python and JSON quote it and as addresses do, and by line: logs are cut up.

    Of an address, its secret alone too: a message may hold another spelling of the address around it.
    """
    import json
    from urllib.parse import quote

    quoted = (repr(value)[1:-1], json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1])
    within = (part for match in _IN_VALUE.finditer(value) for part in match.groups() if part)
    parts = (part for part in (*map(str.strip, value.splitlines()), *within) if len(part) >= SHORT)
    return tuple(dict.fromkeys((value, *quoted, quote(value), quote(value, safe=""), *parts)))


def _replaced(text: str, value: str, mask: str) -> str:
    if len(value) >= SHORT:
        return text.replace(value, mask)
    return re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", mask, text)
