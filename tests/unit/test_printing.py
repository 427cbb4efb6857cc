"""Text of strangers on a terminal and on pages: pictures in place of control characters, and no credentials."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Group
from rich.table import Table
from rich.text import Text

from harness.errors import ConfigError, Problem
from harness.printing import (
    code_span,
    escape_markdown,
    one_line,
    open_console,
    print_line,
    print_text,
    printable,
    redact,
    redact_all,
)
from harness.settings import to_yaml

HOSTILE = "a\x1b]0;title\x07\x1b[2J\x9b1m\x7f[red]b[/red] :smile:\u202e\u2028\ud800\r\n  fix:   run it"
SHOWN = "a\u241b]0;title\u2407\u241b[2J\ufffd1m\u2421[red]b[/red] :smile:\ufffd\ufffd\ufffd\u240d"


def test_control_characters_become_pictures_and_nothing_leaves_a_code_span_or_a_cell() -> None:
    assert printable(HOSTILE) == f"{SHOWN}\n  fix:   run it"
    assert one_line("a\tb\nc") == "a\u2409b\u240ac"
    assert (
        printable("tab\tand line\n, caf\u00e9 \u4e2d\u6587 \u05e9") == "tab\tand line\n, caf\u00e9 \u4e2d\u6587 \u05e9"
    )
    assert code_span("a `b` | c\n# d\x1b") == "`a 'b' \u2502 c # d\u241b`"
    assert escape_markdown("a`b`|<c> [d](e) _f_ g_h\n# i") == r"a\`b\`\|\<c\> \[d\](e) \_f\_ g_h \# i"


def test_an_error_and_a_problem_begin_no_line_with_text_of_a_file() -> None:
    expected = "x\n         fix:   run it\n  where: \u241b[2J\n  fix:   do"
    assert str(ConfigError("x\n  fix:   run it", where="\x1b[2J", fix="do")) == expected
    assert printable(str(Problem("x\n  fix:   run it", "\x1b[2J", "do"))) == expected


def test_tables_groups_and_lines_print_what_a_text_holds(capsys: pytest.CaptureFixture[str]) -> None:
    printed = io.StringIO()
    console = open_console(file=printed, width=200)
    table = Table(f"head {HOSTILE}", title=HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE, style="bold"))
    console.print(Group(table, Text(HOSTILE)), HOSTILE)
    print_line(HOSTILE)
    print_text(HOSTILE)
    lines = printed.getvalue() + capsys.readouterr().out
    assert lines == printable(lines)
    # Rich drops some control characters instead, and an emoji's name is not replaced.
    assert lines.count("\u241b[2J") == 8
    assert lines.count("[red]b[/red] :smile:") == 8


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY"])
def test_credentials_are_redacted_by_value_and_by_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "wJalrXUtnFEMI")
    text = "GET https://u:p@h/b?X-Amz-Signature=abc&y=1 with wJalrXUtnFEMI, token=xyz failed"
    assert redact(text) == "GET https://***@h/b?*** with ***, token=*** failed"
    for given in (f"export {name}='other s'", f"{name}: other", json.dumps({name: "other"})):
        assert "other" not in redact(given)
    assert json.loads(redact(json.dumps({name: "other", "a": 1}))) == {name: "***", "a": 1}
    assert redact_all({"env": {name: "other"}, "a": ["x wJalrXUtnFEMI", 2]}) == {
        "env": {name: "***"},
        "a": ["x ***", 2],
    }
    assert "wJalrXUtnFEMI" not in str(ConfigError("wJalrXUtnFEMI", where="s3://b?x=wJalrXUtnFEMI"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("git+https://ghp_token@host/x failed", "git+https://***@host/x failed"),
        ("http://u:p@ss@host:80/x", "http://***@host:80/x"),
        ("abfs://container@account/x", "abfs://container@account/x"),
        ("https://host/x, or write to me@host", "https://host/x, or write to me@host"),
        ("s3://k:sec/ret@b/x", "s3://***@b/x"),
        ("s3://k:a/b/c@b and redis://:pw@h", "s3://***@b and redis://***@h"),
        ("http://host:8080/me@x and hdfs://nn:9000/a@b/c", "http://host:8080/me@x and hdfs://nn:9000/a@b/c"),
        ("oci://registry:5000/image@sha256:1f", "oci://registry:5000/image@sha256:1f"),
    ],
)
def test_a_user_of_a_web_address_is_a_credential_with_or_without_a_password(text: str, expected: str) -> None:
    assert redact(text) == expected


@pytest.mark.parametrize("value", ["other", "'other s'", '"other"', "oth/er+1=="])
@pytest.mark.parametrize("mark", ["=", ": ", " = ", ":"])
@pytest.mark.parametrize(
    "name",
    [
        *("OPENAI_KEY", "hf_token", "HF_TOKEN", "hf-token", "Wandb_Api_Key", "api_key", "apikey", "apiKey"),
        *("accessToken", "AWS_ACCESS_KEY_ID", "awsAccessKeyId", "AccountKey", "OPENAI_KEY_2", "password", "PGPASSWORD"),
        *("db_passwd", "clientSecret", "secret", "SECRET_NAME", "credentials", "aws_credential", "wandb.api_key"),
        *("trackers.hf_token", "AZURE_STORAGE_CONNECTION_STRING", "ssh_passphrase", "x-api-key"),
    ],
)
def test_the_value_of_a_name_of_a_credential_is_hidden(name: str, mark: str, value: str) -> None:
    shown = redact(f"failed: {name}{mark}{value}, a=1")
    assert "oth" not in shown
    assert shown.startswith(f"failed: {name}{mark}")
    assert shown.endswith(", a=1")
    assert redact_all({name.rpartition(".")[2]: value}) == {name.rpartition(".")[2]: "***"}


@pytest.mark.parametrize(
    "header",
    [
        *("Authorization: Bearer {}", "authorization: basic {}", "Authorization=Token {}", "Proxy-Authorization: {}"),
        *('{{"Authorization": "Bearer {}"}}', "curl -H 'Authorization: Bearer {}'", "sent Bearer {} to h", "token: {}"),
    ],
)
def test_the_value_of_an_authorization_is_hidden(header: str) -> None:
    assert redact(header.format("hf_abc0123456789xyz")) == header.format("***")


@pytest.mark.parametrize(
    "text",
    [
        *("tokens: 123", "pad_token=<pad>", "eos_token: </s>", "bos_token = <s>", "tokenizer=gpt2", "key: value"),
        *("tokenizer.pad_token='<pad>'", "'end_token': '<|im_end|>'", "max_tokens_per_rank=8192", "keys: a, b"),
        *("monkey: 5", "keyboard=us", "token: 7", "unexpected token: }", "pad_token_id=0", "sort_key=name"),
        *("token_dispatcher=alltoall", "token_type_ids: 1", "key_padding_mask=true", "hidden_size=5", "secretary x"),
        *("secretary: bob", "secretaries=2", "Secretariat: UN", "passwordless: true", "passwordless_login=yes"),
        *("secretly: so", "secretion=low", "credentialed: yes"),
        *("experts_per_token=8", "control_tokens=allow", "natural_key: a", "resume_key=b", "pack_key == other"),
        *("CredentialRetrievalError: no file", "InvalidAccessKeyId: The id", "password_file=/x", "HF_TOKEN is not set"),
        *("bearer authentication is required", "basic configuration of 2024", "authorization: denied"),
        *("set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", "the credentials are refused", "multi-token: heads"),
    ],
)
def test_ordinary_words_are_printed_as_they_are(text: str) -> None:
    assert redact(text) == text
    name, _, value = text.replace(" ", "").partition("=" if "=" in text else ":")
    assert redact_all({name: value}) == {name: value}


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        *((f"{name}: {words}", "") for name in ("credentials", "password") for words in ("in the vault", "not set")),
        *(("the secret: see the manual", ""), ("HF_TOKEN: from the environment", "")),
        # A value of one such word, in quotes, or after another mark is a value.
        *(("credentials: in", "in"), ("password: 'in the vault'", "in the vault"), ("password=in the vault", "in")),
        *(("password: inthe vault", "inthe"), ("secret_key: a9 ok", "a9"), ("credentials: in 4 steps", "in")),
        *(("secretary_password: bob", "bob"), ("passwordless_secret=x1", "x1"), ("secretId: x1", "x1")),
        *(("secret_ary: x1", "x1"), ("credentials_led: x1", "x1"), ("SECRETS=x1", "x1"), ("passwords: x1", "x1")),
    ],
)
def test_a_sentence_after_the_name_of_a_credential_is_no_value(text: str, hidden: str) -> None:
    expected = text if not hidden else text.replace(f" {hidden}", " ***").replace(f"={hidden}", "=***")
    assert redact(text) == (expected if "'" not in text else text.replace(hidden, "***"))


def test_settings_keep_text_that_only_looks_like_a_credential() -> None:
    values = {"template": "{% set token=bos_token %}", "TOKENIZERS_PARALLELISM": "false", "weights": "meta/Llama-3"}
    assert redact_all(values) == values
    assert to_yaml({"path": "s3://k:secret@b/x"}) == "path: s3://***@b/x\n"


@pytest.mark.parametrize("part", ["token:", "x-amz-"])
def test_credentials_are_looked_for_in_a_time_that_grows_with_the_text(part: str) -> None:
    text = part * 100_000
    assert len(redact(text)) > 3  # hours, if every place were compared with every other
