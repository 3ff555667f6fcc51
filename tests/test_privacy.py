"""A dump holds no secret and no name of a person, and only its owner may read it."""

from __future__ import annotations

import os
import re
import stat
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.core import places
from llmdebug_nb.core.masking import _SHAPES, _TEXTS, MASK, _replacement, _without_secrets, masked
from llmdebug_nb.core.places import found, line_at, scrubbed, shown
from llmdebug_nb.store import reader
from recordings import record_linear

LETTERS = "AbCdEfGhIjKlMnOpQrStUvWxYz0123456789"
SECRETS = {
    "hf": f"hf_{LETTERS[:34]}",
    "openai": f"sk-proj-{LETTERS}",
    "anthropic": f"sk-ant-api03-{LETTERS}",
    "github": f"ghp_{LETTERS}",
    "github fine-grained": f"github_pat_{LETTERS[:22]}_{LETTERS}",
    "gitlab": f"glpat-{LETTERS[:20]}",
    "aws": "AKIAIOSFODNN7EXAMPLE",
    "google": f"AIza{LETTERS[:35]}",
    "slack": "xoxb-123456789012-abcdefABCDEF",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0",
    "nvidia": f"nvapi-{LETTERS}",
    "groq": f"gsk_{LETTERS}",
    "replicate": f"r8_{LETTERS}",
    "npm": f"npm_{LETTERS}",
    "pypi": f"pypi-{LETTERS}",
    "databricks": f"dapi{'0123456789abcdef' * 2}",
    "stripe": f"sk_live_{LETTERS}",
    "pem": "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA\n-----END RSA PRIVATE KEY-----",
    "pem cut short": "-----BEGIN PRIVATE KEY-----\nMIIEpAIBAAKCAQEA",
}


@pytest.mark.parametrize("secret", SECRETS.values(), ids=SECRETS)
@given(before=st.sampled_from(["", " ", "see ", "'", "(", "url?x="]), after=st.text(max_size=9))
def test_a_token_is_masked_by_its_shape_wherever_it_stands(secret, before, after):
    text = masked(f"{before}{secret} {after}")
    assert secret not in text
    assert MASK in text


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("Authorization: Bearer abc123.def-456", f"Authorization: Bearer {MASK}"),
        ("Authorization: Basic Ym9iOmh1bnRlcg==", f"Authorization: Basic {MASK}"),
        ("https://h/x?a=1&sig=abcdefgh&b=2", f"https://h/x?a=1&sig={MASK}&b=2"),
        ("https://h/x?X-Amz-Signature=0a1b2c3d", f"https://h/x?X-Amz-Signature={MASK}"),
        ("Server=db;User=me;Password=letters;", f"Server=db;User=me;Password={MASK};"),
        ("AccountName=x;AccountKey=abcd0123==;", f"AccountName=x;AccountKey={MASK};"),
        ("https://bob:hunter2@host.org/x", f"https://{MASK}@host.org/x"),
        ("postgres://bob:h%2Fr2@db:5432/x", f"postgres://{MASK}@db:5432/x"),
        ('model = Load(api_key="one two")', f'model = Load(api_key="{MASK}")'),
        ("PASSWORD = 'one'", f"PASSWORD = '{MASK}'"),
        ("{'client_secret': 'one'}", f"{{'client_secret': '{MASK}'}}"),
        ('headers["Authorization"] = "one"', f'headers["Authorization"] = "{MASK}"'),
        ("run.py --api-key 1x2y3zz --n 3", f"run.py --api-key {MASK} --n 3"),
        ("WANDB_API_KEY=1x2y3zz run.py", f"WANDB_API_KEY={MASK} run.py"),
    ],
)
def test_what_stays_of_a_text_still_tells_what_it_was(text, left):
    assert masked(text) == left


PIECES = [
    *SECRETS.values(), "Bearer", "abc123.def-456", "https://bob:", "hunter2@", "api_key",
    "PASSWORD", "='", "= \"", "one two", "--auth-token 1x2y3zz", "://", "-----BEGIN", "eyJ",
    "ſecret", "İ", "'", ":",
    "\n", "\n\n", " ", "x", "x" * 300, "word " * 30, "\n" * 9, "begin", "Secret_Token", "-",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=12), st.sampled_from(["", " ", "\n"]))
def test_what_is_masked_near_hints_is_what_is_masked_in_all_of_a_text(pieces, between):
    text = between.join(pieces)
    assert _without_secrets(text) == re.sub(_TEXTS, _replacement, text)


@pytest.mark.parametrize(
    "text",
    [
        "key_states = self.k_proj(hidden_states)",
        "past_key_values.update(key, value, self.layer_idx)",
        "api_key=api_key, token=token",
        "api_key = os.environ['MY_VARIABLE']",
        "num_key_value_heads=8, pad_token_id=0",
        "task-oriented-dialogue-generation",
        "https://huggingface.co:443/x@y",
        "eyJ is how they begin",
        "the bearer of this",
        "hf_device_map",
        "a basic transformer, in basic English",
        "x?y=1&n=2",
        "sk_learn, r8_x, npm_run, gsk_",
        "secrets.token_bytes",
    ],
)
def test_code_of_llms_is_left_alone(text):
    assert masked(text) == text


@pytest.mark.parametrize(
    "name",
    ["pw", "api_key", "kwargs.token", "hfToken", "0.password", "AUTH", "credentials.user", "key"],
)
def test_a_text_whose_name_says_secret_is_masked(name):
    assert masked("my very own", name) == MASK


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("<s>", "bos_token"), ("<|endoftext|>", "eos_token"), ("[PAD]", "pad_token"),
        ("[1, 2, -1]", "key"), ("gpt2", "tokenizer"), ("ann", "author"), ("monkey", "keyboard"),
        ("", "token"),
    ],
)  # fmt: skip
def test_what_is_no_secret_is_left_alone_under_such_a_name(text, name):
    assert masked(text, name) == text


@given(st.text(max_size=300), st.sampled_from(["", "slot", "kwargs.mode"]))
def test_a_masked_text_is_masked_no_further(text, name):
    assert masked(masked(text, name), name) == masked(text, name)


def test_masking_takes_linear_time():
    import time

    def seconds(n: int) -> float:
        began = time.perf_counter()
        for unit in ("api_key", "a.", "eyJaaaaaaa.", "://", "-----BEGIN PRIVATE KEY-----", "k-"):
            masked.__wrapped__(unit * (n // len(unit)))
        return time.perf_counter() - began

    seconds(100)
    assert seconds(40_000) < 40 * max(seconds(4_000), 0.001)


def test_each_shape_names_its_source():
    assert all(re.search(r"\w{3}", name) and re.compile(shape) for name, shape in _SHAPES.items())


# -- places -------------------------------------------------------------------------------------


@pytest.fixture
def ann(monkeypatch, tmp_path):
    """The account of Ann, whose home is `tmp_path/ann`."""
    home = tmp_path / "ann"
    (home / "port").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("LOGNAME", "annlovelace")
    monkeypatch.chdir(home / "port")
    places._person.cache_clear()
    yield home
    places._person.cache_clear()


def test_a_file_is_named_within_its_project_package_or_home(ann):
    stdlib = Path(os.__file__)
    assert shown(str(ann / "port" / "model.py")) == "model.py"
    assert shown(str(ann / "other" / "model.py")) == "~/other/model.py"
    assert shown("/opt/v/lib/python3.11/site-packages/x/y.py") == "site-packages/x/y.py"
    assert shown(str(ann / "port/.v/lib/site-packages/x/y.py")) == "site-packages/x/y.py"
    assert shown(str(ann / "port/my venv/site-packages/x/y.py")) == "site-packages/x/y.py"
    assert shown(str(stdlib)) == f"{stdlib.parent.name}/os.py"
    assert shown("/data/annlovelace/x.py") == "/data/<user>/x.py"
    assert shown("cell 3") == "cell 3"


@pytest.mark.parametrize("folder", ["port", "other", "port/lib/site-packages/x"])
def test_a_named_file_is_found_again(ann, monkeypatch, folder):
    file = ann / folder / "model.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("first\n  second\n")
    monkeypatch.syspath_prepend(str(ann / "port/lib/site-packages"))
    assert found(shown(str(file))) == str(file)
    assert line_at(shown(str(file)), 2) == "second"


def test_a_project_is_found_from_the_runs_in_it(ann, monkeypatch):
    (ann / "port" / "model.py").write_text("first\n")
    monkeypatch.chdir("/")
    monkeypatch.setattr(sys, "path", [])
    assert found("model.py") is None
    assert found("model.py", ann / "port" / "llmdebug_runs" / "a") is not None


def test_a_dump_makes_no_other_file_than_code_show_its_lines(ann):
    for name in ("~/.ssh/id_rsa", "/etc/passwd", "~/.netrc", "../../../etc/passwd"):
        assert line_at(name, 1) == ""


@given(st.text(alphabet="/ab~.:x-site packages\\", max_size=40))
def test_a_scrubbed_text_is_scrubbed_no_further(text):
    assert scrubbed(scrubbed(text)) == scrubbed(text)


@pytest.mark.parametrize(
    "text", ["/home/ann/x", "open('/Users/ann/x')", "file:///home/ann/x", r"C:\Users\ann\x"]
)
def test_no_home_of_anyone_stays_in_a_text(text):
    assert "ann" not in scrubbed(text)


def test_a_run_opens_by_the_name_that_views_show(ann, monkeypatch):
    with ld.dump(model := nn.Linear(2, 2), name="a-b", path=ann / "runs") as run:
        model(torch.ones(1, 2))
    assert shown(str(run.path)) == "~/runs/a-b"
    assert ld.open_run("~/runs/a-b").path == run.path
    monkeypatch.chdir("/")
    assert ld.open_run(shown(str(run.path))).path == run.path


# -- recordings ---------------------------------------------------------------------------------


class Caller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.hub_token, self.cache_dir = SECRETS["hf"], "/home/annlovelace/cache"

    def forward(self, x, api_key, config, note):
        password = "in the code"
        return self.linear(x + len(password)) + len("sk-abcdefghijklmnopqrstuvwxyz") + 0.5


@pytest.fixture
def secretive(tmp_path, recorded_with_secrets):
    return recorded_with_secrets


@pytest.fixture
def recorded_with_secrets(tmp_path):
    model = Caller()
    config = {"client_secret": "tea for two", "url": "https://bob:hunter2@host/"}
    with ld.dump(model, name="a", path=tmp_path / "runs", mode="module+api") as run:
        model(torch.ones(2, 4), api_key="my very own", config=config, note=f"is {SECRETS['jwt']}")
    return run


def _bytes_of(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


def test_no_file_of_a_dump_holds_a_secret(secretive):
    data = _bytes_of(secretive.path)
    left = [
        secret
        for secret in (
            SECRETS["hf"], SECRETS["jwt"], "my very own", "tea for two", "hunter2", "in the code",
            "sk-abcdefghijklmnopqrstuvwxyz", "annlovelace", str(Path(__file__).parent),
            str(Path.home()) + "/", sys.prefix,
        )
        if secret.encode() in data
    ]  # fmt: skip
    assert left == []


def test_info_counts_what_was_masked(secretive):
    scalars = secretive.scalars()
    values = [value for value in scalars["value"] if isinstance(value, str) and MASK in value]
    assert secretive.info()["masked"] >= len(values) >= 5


def test_other_texts_of_a_dump_stay(secretive):
    values = secretive.scalars().set_index("slot")["value"]
    assert values["cache_dir"] == "~/cache"
    assert values["kwargs.config.url"] == f"https://{MASK}@host/"
    assert values["kwargs.note"] == f"is {MASK}"


def test_the_lines_of_a_program_are_found_from_their_short_names(secretive):
    frame = secretive.stack("/Tensor.add")[0]
    file, line = frame.split(" ")[0].rsplit(":", 1)
    assert found(file, secretive.path) == __file__
    assert "self.linear(x + len(password))" in line_at(file, int(line))


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
@pytest.mark.parametrize("umask", [0, 0o22, 0o77])
def test_only_its_owner_may_read_a_dump_whatever_the_umask(tmp_path, umask):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o775)
    model, modes = nn.Linear(4, 4), {}

    def note(folder: Path) -> None:
        for path in (folder, *folder.rglob("*")):
            modes[path.name] = stat.S_IMODE(path.stat().st_mode), path.is_dir()

    before = os.umask(umask)
    try:
        for parent in (shared, tmp_path / "fresh"):
            with ld.dump(model, name="a", path=parent) as run:
                model(torch.ones(2, 4))
                note(run.path)  # with the log of SQLite
            note(run.path)
        ld.reduce_run(run, name="b")
        note(tmp_path / "fresh")
    finally:
        os.umask(before)
    assert "index.sqlite-wal" in modes
    assert {mode for mode, is_folder in modes.values() if is_folder} == {0o700}
    assert {mode for mode, is_folder in modes.values() if not is_folder} == {0o600}
    assert stat.S_IMODE(shared.stat().st_mode) == 0o775


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_marks_of_what_is_expected_are_their_owners_until_shared(tmp_path):
    runs = [
        ld.open_run(record_linear(tmp_path, name, scale)) for name, scale in (("a", 1), ("b", 2))
    ]
    report = ld.compare(*runs)
    report.expect("*", "a reason")
    (file,) = tmp_path.rglob("*.expected.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o664)
    report.expect("0", "another")
    assert stat.S_IMODE(file.stat().st_mode) == 0o664


def test_a_masked_value_is_no_difference(tmp_path, secretive):
    model = Caller()
    model.load_state_dict(Caller().state_dict())
    runs = []
    for name, key in (("b", "one"), ("c", "other")):
        with ld.dump(model, name=name, path=tmp_path / "runs") as run:
            model(torch.ones(2, 4), api_key=key, config={}, note="")
        runs.append(reader.native(run.path))
    assert ld.compare(*runs).verdict == "match"
