"""Secrets never reach a page, a message or a log."""

import json
import re
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.redaction import NO_PASSWORD, redacted
from infra.refusal import Refusal
from models.config.recipe import RunConfig, load_recipe

TINY = Path(__file__).parents[2] / "recipes" / "tiny.yaml"


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        ("postgresql+psycopg://me:s3cr:et@db:5432/x", "postgresql+psycopg://me:***@db:5432/x"),
        ("postgresql://me:with/slash@db/x", "postgresql://me:***@db/x"),
        ("postgresql://me:with@at@db/x", "postgresql://me:***@db/x"),
        ("postgresql://me@db/x", "postgresql://me@db/x"),
        ("https://:token@mlflow.example/", "https://:***@mlflow.example/"),
        ("https://ghp_0123@mlflow.example/", "https://***@mlflow.example/"),
        ("postgresql://db/x?password=s3cret&sslmode=require", "postgresql://db/x?password=***&sslmode=require"),
        ("postgresql://db/x?sslmode=require&sslpassword=s3cret", "postgresql://db/x?sslmode=require&sslpassword=***"),
        ("host=db password=s3cret user=me", "host=db password=*** user=me"),
        (
            "https://b.s3.example/a.jsonl?X-Amz-Date=1&X-Amz-Signature=0a1b&x=1",
            "https://b.s3.example/a.jsonl?X-Amz-Date=1&X-Amz-Signature=***&x=1",
        ),
        ("https://a.blob.example/c?sv=1&sig=ab%2F", "https://a.blob.example/c?sv=1&sig=***"),
        ("https://a.example/c?access_token=ab&api_key=cd", "https://a.example/c?access_token=***&api_key=***"),
        ("sqlite:////runs/ledger.sqlite", "sqlite:////runs/ledger.sqlite"),
        ("hf://datasets/OWNER/NAME@main?config=C&split=S", "hf://datasets/OWNER/NAME@main?config=C&split=S"),
        ("https://example.org:8080/a", "https://example.org:8080/a"),
        ("OWNER/NAME@0123", "OWNER/NAME@0123"),
        (
            "https://a.example/c?sig=%22a%22b&token_a=b&mask_token=c",
            "https://a.example/c?sig=***&token_a=***&mask_token=***",
        ),
        ('https://a.example/c?sig="a"b&x=1', "https://a.example/c?sig=***&x=1"),
        ("https://a.example/c?apiKey=a&pass=b&code=c", "https://a.example/c?apiKey=***&pass=***&code=***"),
        ("AccountName=x;AccountKey=ab==", "AccountName=x;AccountKey=***"),
        ("host=db password='two words' user=me", "host=db password=*** user=me"),
        ({"ledger": {"url": "a://b:c@d"}, "ids": (1, None)}, {"ledger": {"url": "a://b:***@d"}, "ids": [1, None]}),
    ],
)
def test_secrets_are_hidden_and_nothing_else(setting: object, shown: object) -> None:
    assert redacted(setting) == shown
    if isinstance(setting, str):
        assert bool(re.search(NO_PASSWORD, setting)) == (shown == setting)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Authorization: Bearer hf_Ab1", "Authorization: ***"),
        ('{"password": "two words", "user": "me"}', '{"password": ***, "user": "me"}'),
        ("password: correct-horse\nuser: me", "password: ***\nuser: me"),
        ("x-api-key:0123", "x-api-key:***"),
        ("launch_server --api-key 0123 --port 1", "launch_server --api-key *** --port 1"),
        ("['--admin-api-key', 'abc', '--port', '1']", "['--admin-api-key', ***, '--port', '1']"),
        (f"token hf_{'aB3' * 11} is not valid", "token *** is not valid"),
        (f"sent sk-proj-{'x1' * 20} and ghp_{'Zz9' * 12}", "sent *** and ***"),
        ("AKIAIOSFODNN7EXAMPLE", "***"),
        ("a Bearer abcdef0123", "a Bearer ***"),
        ("Cookie: sessionid=ab; theme=dark\nHost: a", "Cookie: ***\nHost: a"),
        ("{'Set-Cookie': 'mlflow=ab; Path=/', 'x': 1}", "{'Set-Cookie': '***', 'x': 1}"),
        ({"headers": {"Cookie": "a=b", "Host": "c"}}, {"headers": {"Cookie": "***", "Host": "c"}}),
        ("sessionid=ab&x=1; JSESSIONID=cd", "sessionid=***&x=1; JSESSIONID=***"),
        (f'{{"session_id": "{"0a" * 16}", "x": 1}}', '{"session_id": "***", "x": 1}'),
        ("https://hooks.slack.com/services/T0/B0/aBc is 404", "https://hooks.slack.com/services/*** is 404"),
        (
            "https://discord.com/api/v10/webhooks/12/aB-c?wait=true",
            "https://discord.com/api/v10/webhooks/12/***?wait=true",
        ),
        (
            "POST https://a.webhook.office.com/webhookb2/1-a@2-b/IncomingWebhook/c/d: 403",
            "POST https://a.webhook.office.com/webhookb2/*** 403",
        ),
        ("https://api.telegram.org/bot12:aB_c/sendMessage", "https://api.telegram.org/bot***"),
        (f"https://chat.example/hooks/{'a1' * 13}", "https://chat.example/hooks/***"),
        (["--api-key", "ab", "--port", "1"], ["--api-key", "***", "--port", "1"]),
        ({"env": {"HF_TOKEN": "ab", "HF_HOME": "cd"}}, {"env": {"HF_TOKEN": "***", "HF_HOME": "cd"}}),
    ],
)
def test_secrets_are_hidden_however_they_are_written(text: object, shown: object) -> None:
    assert redacted(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens=64 prompt_tokens=8 num_draft_tokens=4 tokens=3 token_ids=[1, 2]",
        "tokens_per_s=5.5, tokens_per_s: 5.5, train/tokens_per_second=3, token_accuracy=0.5",
        "num_key_value_heads=8 num_keys=4 key=value monkey=banana",
        "the last token: 5, token: 5, tokens: 5; key: step, first token: international",
        "add_special_tokens=False special_tokens=x eos_token=</s> pad_token=<pad> draft_token=5",
        '{"eos_token": "</s>", "token": "the", "key": "a", "max_tokens": 64}',
        "it asks for a password: set $PGPASSWORD, or write ~/.pgpass",
        "holds a password or token, and a recipe is shown: leave it out",
        "--speculative-num-draft-tokens 4 --skip-tokenizer-init --tokenizer-path x --max-tokens 5",
        "forward_pass=0.5 passed=4 bypass=1 pass: 3 of 4",
        "status_code=200, exit code=3",
        "Bearer authentication failed",
        "session=5 session_id=12 session: main, 3 sessions=of-a-long-name-without-digits cookie: a chocolate one",
        "tmux session=draftsmith-quickstart num_sessions=4 session_timeout=86400 max_session=1234567890123456",
        "https://hooks.example.org/services/a https://discord.com/api/users/1 https://a.example/hooks/pre-commit",
        "https://docs.slack.com/messaging/webhooks and https://github.com/pre-commit/pre-commit-hooks/tree/v5.0.0",
        "password:\nuser: me",
        "/data/sk-wikipedia-20231101-part1.jsonl and sk-wikipedia-20231101-part1-of-9.jsonl",
        "task-0123456789abcdef0123456789 sk-learn-is-an-ordinary-name hf_transfer",
    ],
)
def test_other_words_stay(text: str) -> None:
    assert redacted(text) == text
    assert re.search(NO_PASSWORD, text.replace(" ", "_"))


def test_a_recipe_without_secrets_is_shown_as_it_is() -> None:
    for recipe in TINY.parent.glob("*.yaml"):
        config = load_recipe(recipe).model_dump(mode="json")
        assert redacted(config) == config


# A secret that the rest of the address contains by chance could not be told from it: the marks make it unlike.
secrets = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zs", "Zl", "Zp")), max_size=20).map(
    lambda text: f"SE{text}RET"
)
whole = st.sampled_from(["{}", "ledger.url={}", "cannot read {}: no such host", "got '{}'\n  in data.source"])


@given(secrets, whole)
def test_no_password_is_shown(secret: str, text: str) -> None:
    for address in (f"postgresql://me:{secret}@db:5432/x?sslmode=require", f"https://:{secret}@host/path"):
        shown = redacted(text.replace("{}", address))
        assert secret not in shown
        assert "SE" not in shown
        assert re.search(NO_PASSWORD, address) is None


@given(
    secrets,
    st.sampled_from(["password", "sslpassword", "X-Amz-Signature", "X-Amz-Security-Token", "sig", "Signature",
                     "X-Goog-Signature", "token", "access_token", "api_key", "client_secret", "AWSAccessKeyId",
                     "apikey", "apiKey", "accountkey", "SharedAccessKey", "key", "api_keys", "pass", "db_pass", "jwt",
                     "credentials", "access_tokens", "code", "sas"]),
    whole,
)  # fmt: skip
def test_no_parameter_of_an_address_is_shown(secret: str, name: str, text: str) -> None:
    for address in (f"https://host/a?x=1&{name}={quote(secret, safe='')}&y=2", f"s3://b/c?{name}={quote(secret)}"):
        assert quote(secret) not in redacted(text.replace("{}", address))
        assert "SE" not in redacted(text.replace("{}", address))
        assert re.search(NO_PASSWORD, address) is None


@given(secrets)
def test_a_refusal_never_repeats_a_secret(secret: str) -> None:
    assert "SE" not in str(Refusal(f"data.source s3://me:{secret}@host/x cannot be read: check the address"))


ADDRESSES = ["target.name", "training.start_from", "ledger.url", "transport.folder", "tracking.uri", "data.source"]


@pytest.mark.parametrize("setting", [*ADDRESSES, "promotion.suites.own"])
@pytest.mark.parametrize(
    "address", ["https://me:sec/ret@host/x", "https://host/x?X-Amz-Signature=secret", "https://secret@host/x"]
)
def test_no_address_of_a_recipe_takes_a_secret(setting: str, address: str) -> None:
    with pytest.raises(Refusal, match="holds a") as refused:
        load_recipe(TINY, [f"{setting}={address}"])
    assert "secret" not in str(refused.value)
    assert "sec/ret" not in str(refused.value)


@pytest.mark.parametrize(
    "given", ['"--api-key","se cret"', '"--admin-api-key=secret"', '"--ssl-keyfile-password","secret"']
)
def test_no_argument_of_a_server_takes_a_secret(given: str) -> None:
    with pytest.raises(Refusal, match=r"arguments hold a secret, .*--config with its path") as refused:
        load_recipe(TINY, [f'generator.sglang.arguments=["--trust-remote-code",{given},"--port","1"]'])
    assert "cret" not in str(refused.value).partition("hold a secret")[2]


def test_forms_refuse_them_as_well() -> None:
    """Prefect checks a form by its schema before it stores what was filled in."""
    schema = json.dumps(RunConfig.model_json_schema())
    assert schema.count(json.dumps(NO_PASSWORD)) >= len(ADDRESSES) + 1
