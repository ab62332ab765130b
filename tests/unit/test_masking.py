"""Secrets of a job's `env`: which variables hold some, and that only the ranks see their values."""

import json
from pathlib import Path
from urllib.parse import quote

import pytest
from click.testing import CliRunner

from gpurun.launcher.cli.main import cli
from gpurun.launcher.errors import SpecError
from gpurun.launcher.failures.reporter import Reporter
from gpurun.launcher.jobfile.load import load_text, masked_overrides
from gpurun.launcher.masking import hidden, is_mask, is_secret, masked, revealed
from gpurun.launcher.rundir.files import RunDir
from tests.wording import Wording

VALUE = "hf_0123456789abcdef"
JOB = f"""
name: t
script: {__file__}
devices: cpu:1
env: {{HF_TOKEN: {VALUE}, NCCL_DEBUG: INFO}}
compare: {{env: [{{DB_PASSWORD: "first secret"}}, {{DB_PASSWORD: 12345678}}]}}
"""


SECRET = """
HF_TOKEN HF_TOKENS HFTOKEN token TOKEN2 hfToken accessTokens GITHUB_PAT SLACK_WEBHOOK_URL
WANDB_API_KEY OPENAI_APIKEY APIKEYS API_KEY2 API-KEY apiKeyId SSHKEY SSHKEYS sshKey DEPLOYKEY KEY S3KEY
ACCESSKEYID AWS_SECRET_ACCESS_KEY CLIENTSECRET clientSecret KUBE_SECRETS
PGPASSWORD PASSWD PASSWORDS PASSWORT PASSPHRASE SSHPASSPHRASE PASSCODE SSH_PASS SSHPASS SMTPPASS REQUIREPASS
MYSQL_PWD DB_PWDS PGPWD dbPwd
AUTHORIZATION HTTP_AUTHORIZATION AUTHORISATION AUTH NETRC_AUTH OAUTH BASICAUTH OAUTH2_CLIENT
GOOGLE_APPLICATION_CREDENTIALS CREDENTIAL CREDS BEARER HTTP_BEARER COOKIE SLACK_COOKIES SESSIONCOOKIE
SENTRY_DSN DATABASEDSN AZURE_STORAGE_SAS AZURE_CONNECTION_STRING CONNECTIONSTRING ConnectionStrings__Default
SAS_TOKEN JWT TOTP OTP MY_PIN SIGNATURE WEBHOOK_SIGNATURES cardPin
TOKENV2 MASTERKEYV1 apiKeyV2 HF_TOKEN_V2 PSWD DB_PSWD PINCODE PINCODES SEED_PHRASE SEEDPHRASE
ENCRYPTION_PHRASE recoveryPhrase WALLET_MNEMONIC SSH_PRIVATE ED25519_PRIVATE AWS_ACCESS AWS_ACCESS_ID
"""
NO_SECRET = """
PATH PYTHONPATH HOME PWD OLDPWD INIT_CWD PATTERN PAD PIN_MEMORY NCCL_DEBUG SASS TORCH_DSNAME
KEYBOARD MONKEY MONKEYS TURKEY HOCKEY_TEAM HOTKEY KEYRING_BACKEND GPG_PUBKEY
TOKENIZERS_PARALLELISM TOKENIZER MAX_TOKENS maxTokens NUMTOKENS NUM_TRAIN_TOKENS TOKENS_PER_BATCH STOP_TOKENS
AUTHOR GIT_AUTHOR_NAME AUTHORITY XAUTHORITY COMPASS BYPASS COMPASS_URL NUM_PASSES PASSES SECRETARY
KEYBOARDV2 MONKEYV1 CONV2 MP3 PHRASE WAKE_PHRASE PARAPHRASES SEED RANDOM_SEED PRIVATE IS_PRIVATE
GIT_PRIVATE_REPO FAST_ACCESS ACCESS AWS_REGION ENCRYPTION
COOKIECUTTER BEARING CONNECTIONS CREDIT PIN_THREADS CPU_PIN NUMA_PIN SIGNATURE_VERSION SPIN ASSIGNATURE
"""


@pytest.mark.parametrize("name", SECRET.split())
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", NO_SECRET.split())
def test_other_names(name: str) -> None:
    assert not is_secret(name)
    assert masked(name, "value") == "value"


@pytest.mark.parametrize(
    "value",
    [
        "http://me:secret@proxy:3128",
        "postgres://me:pa/ss@host/db",
        "postgres://me:p@ss:w/rd?#@host:5432/db",
        "redis://:secret@host",
        "https://ghp_0123456789abcdef0123@github.com/me/data.git",
        "https://host/data?sv=2024&sig=abc%2Fdef",
        "https://host/data?access_token=abcdef",
        "DefaultEndpointsProtocol=https;AccountName=me;AccountKey=abc==;EndpointSuffix=x",
        "Server=db;User=me;Password=secret",
        "machine x login y password s3cret",
        "machine x\n  login y\n  password s3cret\n",
        "machine x password s3cret",
        "Authorization: Bearer abcdef0123456789",
        "AUTHORIZATION: basic bWU6c2VjcmV0",
        '{"Authorization": "Bearer abcdef"}',
        "-H 'authorization=abcdef0123'",
        "bearer abcdef0123456789abcdef",
        "ghp_0123456789abcdefABCDEF0123456789abcd",
        "the token is github_pat_11AAAAAAA0abcdefghij_0123456789.",
        "glpat-0123456789abcdefghij",
        "xoxb-123456789012-abcdefABCDEF",
        "xoxp-123456789012-abcdefABCDEF",
        "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH",
        "sk-proj-0123456789abcdefghijklmnopqrstuvwxyz",
        "AKIAIOSFODNN7EXAMPLE",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmN",
        "https://hooks.slack.com/services/T000/B000/abcdef",
        "https://discord.com/api/webhooks/123/abcdef",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n-----END OPENSSH PRIVATE KEY-----\n",
    ],
)
def test_a_value_with_a_secret_is_masked_whatever_the_name(value: str) -> None:
    assert is_mask(masked("PLACE", value))


@pytest.mark.parametrize(
    "value",
    [
        "http://proxy:3128/",
        "ssh://git@github.com/me/code.git",
        "me@host:/data",
        "s3://bucket/a?part=3",
        "--xla_dump_hlo_pass_re=.* a:b",
        "tcp://10.0.0.1:29500",
        "asks for login and password",
        "authorization is required for everyone",
        "hf_transfer_of_a_very_long_name_of_a_file",
        "the bearer of news",
        "https://slack.com/services/overview",
        "ghp_short",
        "sk-learn",
        "-----BEGIN PUBLIC KEY-----\nMIIB",
    ],
)
def test_a_value_without_one_is_not(value: str) -> None:
    assert masked("PLACE", value) == value


def test_the_password_of_an_address_is_masked_in_another_spelling_of_the_address() -> None:
    address = "postgres://me:pa/ss/word@host/db"
    text = hidden("refused: postgres://me:pa/ss/word@10.0.0.1:5432/db", [("DATABASE_URL", address)])
    assert text == f"refused: postgres://me:{masked('DATABASE_URL', address)}@10.0.0.1:5432/db"


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
    wording: Wording,
) -> None:
    masks = {"HF_TOKEN": masked("HF_TOKEN", VALUE)}
    with wording.raises(SpecError):
        revealed(masks, {})
    monkeypatch.setenv("HF_TOKEN", "another value")
    with wording.raises(SpecError):
        revealed(masks, {})
    monkeypatch.setenv("HF_TOKEN", VALUE)
    assert revealed(masks, {}) == {"HF_TOKEN": VALUE}


def test_secrets_in_a_text_are_masked_where_they_are_long_enough_to_be_recognized() -> None:
    proxy = "http://me:word@proxy:3128"
    variables = {
        "HF_TOKEN": VALUE,
        "PASS": "hunter2",
        "PIN_PASS": "123",
        "HOME": "/home",
        "http_proxy": proxy,
    }
    text = f"401 for x{VALUE}x; hunter2, hunter21; 123; /home; {proxy}/"
    token, word, address = (masked(name, variables[name]) for name in ("HF_TOKEN", "PASS", "http_proxy"))
    assert hidden(text, variables.items()) == f"401 for x{token}x; {word}, hunter21; 123; /home; {address}/"


def test_a_secret_of_several_lines_is_masked_however_it_is_quoted() -> None:
    key = "-----BEGIN KEY-----\nMIIEvQ/ä'+0123456\nSecondLine=\n-----END KEY-----\n"
    texts = [
        key,
        repr(key),
        json.dumps(key),
        json.dumps(key, ensure_ascii=False),
        quote(key),
        quote(key, safe=""),
    ]
    for text in (*texts, *key.splitlines(), repr({"TLS_PRIVATE_KEY": key})):
        shown = hidden(text, [("TLS_PRIVATE_KEY", key)])
        assert masked("TLS_PRIVATE_KEY", key) in shown
        assert not [part for part in ("BEGIN", "MIIEvQ", "0123456", "SecondLine") if part in shown]


@pytest.mark.parametrize(
    "override",
    [
        f"env.HF_TOKEN={VALUE}",
        f'env.HF_TOKEN="{VALUE[:2]}\\x5f{VALUE[3:]}"',
        f'env={{HF_TOKEN: "\\u0068{VALUE[1:]}"}}',
        f'compare.env=[{{HF_TOKEN: "{VALUE[:-1]}\\x66"}}, {{HF_TOKEN: other-value}}]',
        f"compare.env.0.HF_TOKEN={VALUE}",
    ],
)
def test_no_spelling_of_an_override_is_kept(override: str, tmp_path: Path) -> None:
    """JSON is YAML too, in which a letter may be an escape."""
    spec = load_text(JOB, "job.yaml", (override, "steps.launches=3"), Path("/"))
    assert spec.secrets[masked("HF_TOKEN", VALUE)] == VALUE
    kept = masked_overrides((override, "steps.launches=3"), spec)
    assert masked("HF_TOKEN", VALUE) in kept[0]
    assert kept[1] == "steps.launches=3"
    again = load_text(JOB, "job.yaml", kept, Path("/"))
    assert again.resolved() == spec.resolved()


@pytest.mark.parametrize(
    "env",
    [
        f"HF_TOKEN={VALUE}",
        VALUE,
        {f"HF_TOKEN={VALUE}": "x"},
        {f"={VALUE}": "x"},
        [f"HF_TOKEN={VALUE}"],
        [{"HF_TOKEN": VALUE}],
        [{"HF_TOKEN": VALUE}, {"HF_TOKEN": VALUE + "0"}],
    ],
)
@pytest.mark.parametrize("key", ["env", "compare"])
def test_no_message_about_a_mistake_in_env_shows_a_value(env: object, key: str) -> None:
    written = {"env": env} if key == "env" else {"compare": {"env": [env, {"A": "B"}]}}
    job = {"name": "t", "script": __file__, "devices": "cpu:1", **written}
    with pytest.raises(SpecError) as caught:
        load_text(json.dumps(job), "job.yaml", (), Path("/"))
    assert "env" in str(caught.value)
    assert VALUE not in str(caught.value)


def test_no_secret_reaches_a_record_in_the_spelling_of_json(tmp_path: Path) -> None:
    secret = 'say "friend"\\ and é'
    said: list[str] = []
    reporter = Reporter(RunDir(tmp_path), said.append, lambda text: hidden(text, [("PASS", secret)]))
    reporter.write(tmp_path / "cause.json", {"message": f"no entry: {secret}", "lines": [secret]})
    kept = json.loads((tmp_path / "cause.json").read_text())
    assert kept == {"message": f"no entry: {masked('PASS', secret)}", "lines": [masked("PASS", secret)]}


def test_a_batch_script_holds_no_secret(tmp_path: Path, wording: Wording) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    words = ["submit", str(tmp_path / "job.yaml"), "--slurm", "--dry-run", "--set", f"env.HF_TOKEN={VALUE}"]
    done = CliRunner().invoke(cli, words)
    wording(str(done.exception))
    assert VALUE not in done.output
