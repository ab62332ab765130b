"""Secrets of a job's `env`: which variables hold some, and that only the ranks see their values."""

from pathlib import Path

import pytest

from gpurun.launcher.errors import SpecError
from gpurun.launcher.jobfile.load import load_text
from gpurun.launcher.masking import hidden, is_secret, masked, revealed

VALUE = "hf_0123456789abcdef"
JOB = f"""
name: t
script: {__file__}
devices: cpu:1
env: {{HF_TOKEN: {VALUE}, NCCL_DEBUG: INFO}}
compare: {{env: [{{DB_PASSWORD: "first secret"}}, {{DB_PASSWORD: 12345678}}]}}
"""


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "MYSQL_PWD", "SSH_PASS"),
        *("token", "GOOGLE_APPLICATION_CREDENTIALS", "NETRC_AUTH", "KEY"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    ["TOKENIZERS_PARALLELISM", "MAX_TOKENS", "PWD", "OLDPWD", "KEYBOARD", "AUTHOR", "COMPASS", "NCCL_DEBUG"],
)
def test_other_names(name: str) -> None:
    assert not is_secret(name)
    assert masked(name, "value") == "value"


def test_a_mask_shows_whether_the_value_is_the_same_and_nothing_else() -> None:
    mask = masked("HF_TOKEN", VALUE)
    assert mask == masked("HF_TOKEN", VALUE)
    assert mask != masked("HF_TOKEN", VALUE + "0")
    assert mask != masked("OTHER_TOKEN", VALUE)
    assert masked("HF_TOKEN", mask) == mask
    assert len(mask) == len("masked:3fa2b1")


def test_a_job_holds_masks_and_its_ranks_get_the_values() -> None:
    spec = load_text(JOB, "job.yaml", (), Path("/"))
    assert VALUE not in str(spec.resolved())
    assert "first secret" not in str(spec.resolved())
    assert spec.env == {"HF_TOKEN": masked("HF_TOKEN", VALUE), "NCCL_DEBUG": "INFO"}
    assert revealed(spec.env, spec.secrets) == {"HF_TOKEN": VALUE, "NCCL_DEBUG": "INFO"}
    found = [revealed(env, spec.secrets)["DB_PASSWORD"] for env in spec.compare.env]
    assert found == ["first secret", "12345678"]


def test_the_environment_of_the_command_has_what_a_copy_of_the_job_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    masks = {"HF_TOKEN": masked("HF_TOKEN", VALUE)}
    with pytest.raises(SpecError, match="export the same value, HF_TOKEN="):
        revealed(masks, {})
    monkeypatch.setenv("HF_TOKEN", "another value")
    with pytest.raises(SpecError, match="only the mask of HF_TOKEN"):
        revealed(masks, {})
    monkeypatch.setenv("HF_TOKEN", VALUE)
    assert revealed(masks, {}) == {"HF_TOKEN": VALUE}


def test_secrets_in_a_text_are_masked_where_they_are_long_enough_to_be_recognized() -> None:
    variables = {"HF_TOKEN": VALUE, "DB_PASS": "short", "HOME": "/home/someone"}
    text = f"401 for {VALUE}; short; /home/someone"
    assert hidden(text, variables.items()) == f"401 for {masked('HF_TOKEN', VALUE)}; short; /home/someone"
