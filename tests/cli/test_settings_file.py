"""Options from the environment and from files: which one counts, and what is refused."""

import json

import click
import pytest
from click.testing import CliRunner
from engines import DATA
from hypothesis import HealthCheck, given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from cli.main import main
from cli.settings_file import LARGEST

MODEL = str(DATA / "llama.gguf")
#: ids of the tokens that a run makes: the number of them says which n counted
ASK = ["-m", MODEL, "-p", "a", "--temp", "0", "--ignore-eos", "--device", "host", "-t", "1"]


@pytest.fixture
def settings(tmp_path):
    """Write a file; its path."""

    def write(text):
        path = tmp_path / "settings.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


@pytest.fixture
def seen(monkeypatch):
    """What ``generate`` is called with, instead of generating."""
    kept = {}
    context = click.Context(main)
    command = main.get_command(context, "generate")
    monkeypatch.setattr(command, "callback", lambda **values: kept.update(values))
    return kept


def run(*arguments, env=None):
    return CliRunner(env=env).invoke(main, list(arguments))


def test_each_source_goes_before_the_next(seen, settings):
    path = settings("n-predict = 3\nctx-size = 64\nseed = 9\n")
    env = {"REFENGINE_N_PREDICT": "4", "REFENGINE_CTX_SIZE": "128"}
    assert run("generate", *ASK, "--config", path, "-n", "5", env=env).exit_code == 0
    assert (seen["n_predict"], seen["n_ctx"], seen["seed"]) == (5, 128, 9)


def test_a_table_is_for_one_command_and_goes_before_the_top(seen, settings):
    path = settings("seed = 1\nctx-size = 64\n[generate]\nseed = 2\n[soak]\nseed = 3\n")
    assert run("generate", *ASK, "--config", path).exit_code == 0
    assert (seen["seed"], seen["n_ctx"]) == (2, 64)


def test_every_long_flag_of_an_option_is_a_key_and_a_variable(seen, settings):
    assert run("generate", *ASK, "--config", settings("predict = 7\n")).exit_code == 0
    assert seen["n_predict"] == 7
    assert run("generate", *ASK, env={"REFENGINE_PREDICT": "8"}).exit_code == 0
    assert seen["n_predict"] == 8


def test_flags_and_repeatable_options(seen, settings):
    path = settings('no-cuda-graphs = true\noverride-kv = ["a=int:1", "b=int:2"]\n')
    assert run("generate", *ASK, "--config", path).exit_code == 0
    assert seen["cuda_graphs"] is False
    assert list(seen["override_kv"]) == ["a=int:1", "b=int:2"]
    assert run("generate", *ASK, "--config", settings("no-cuda-graphs = false\n")).exit_code == 0
    assert seen["cuda_graphs"] is True
    assert run("generate", *ASK, env={"REFENGINE_NO_CUDA_GRAPHS": "1"}).exit_code == 0
    assert seen["cuda_graphs"] is False
    assert run("generate", *ASK, "--config", settings('override-kv = "a=int:1"\n')).exit_code == 0
    assert list(seen["override_kv"]) == ["a=int:1"]


def test_an_option_of_another_command_at_the_top_is_none_of_this_one(seen, settings):
    assert run("generate", *ASK, "--config", settings("retries = 5\n")).exit_code == 0
    assert "retries" not in seen


def test_a_required_option_may_come_from_the_file(seen, settings):
    path = settings(f'model = "{MODEL}"\nprompt = "a"\n')
    assert run("generate", "--config", path).exit_code == 0
    assert str(seen["model"]) == MODEL


def test_the_file_itself_may_be_named_by_the_environment(seen, settings):
    assert run("generate", *ASK, env={"REFENGINE_CONFIG": settings("seed = 4\n")}).exit_code == 0
    assert seen["seed"] == 4


REFUSED = {
    "unknown key": ("sede = 1\n", "sede is no option: seed?"),
    "unknown key of another command": ("[soak]\nparalel = 1\n", "soak.paralel is no option: parallel?"),
    "unknown command": ("[generte]\nseed = 1\n", "generte is no command: generate?"),
    "the file's own option": ('config = "x"\n', "config is no option"),
    "a flag that is none here": (
        "[generate]\ngpu-layers = 9\n",
        "gpu-layers: the whole model runs on one device",
    ),
    "number for a flag": ("no-cuda-graphs = 1\n", "no-cuda-graphs is 1; want true or false"),
    "truth for a number": ("seed = true\n", "seed is True; want a text or a number"),
    "list for one": ("seed = [1, 2]\n", "seed is [1, 2]; want a text or a number"),
    "date": ("seed = 2026-01-01\n", "want a text or a number"),
    "NUL": ('report = "a\\u0000b"\n', "report is 'a\\x00b'; want text without NUL"),
    "wrong list": ("override-kv = [1, [2]]\n", "want texts or numbers in a list"),
    "wrong type": ('seed = "x"\n', "'x' is not a valid integer. (from "),
    "no TOML": ("seed = = 1\n", "is no TOML"),
    "no text": (b"\xff\xfe\x00", "is no TOML"),
    "deep": ("a = " + "[" * 5000, "is no TOML"),
    "large": (b"#" * (LARGEST + 1), f"at most {LARGEST} bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_setting_is_one_line(settings, name):
    text, wanted = REFUSED[name]
    made = run("generate", *ASK, "--config", settings(text))
    assert made.exit_code == 2, made.output
    lines = made.stderr.splitlines()
    assert len(lines) == 1, lines
    assert wanted in lines[0]


def test_a_missing_file_is_one_line(tmp_path):
    made = run("generate", *ASK, "--config", str(tmp_path / "none.toml"))
    assert made.exit_code == 2
    assert "none.toml" in made.stderr


def test_a_wrong_variable_is_named():
    made = run("generate", *ASK, env={"REFENGINE_CTX_SIZE": "many"})
    assert made.exit_code == 2
    assert "'many' is not a valid integer. (from REFENGINE_CTX_SIZE)" in made.stderr


def test_a_variable_of_a_flag_is_true_or_false(seen):
    made = run("generate", *ASK, env={"REFENGINE_NO_CUDA_GRAPHS": "perhaps"})
    assert made.exit_code == 2
    assert made.stderr.splitlines() == [
        "refengine: error: REFENGINE_NO_CUDA_GRAPHS is 'perhaps'; want true or false"
    ]


def toml_of(value):
    """TOML of what hypothesis drew."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml_of(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_of, value)) + "]"
    if isinstance(value, float):
        return str(value)
    return json.dumps(value)


scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.sampled_from(["", "1", "cuda", "no", "\x00", "é"]),
)
values = st.one_of(
    scalars, st.lists(scalars, max_size=2), st.dictionaries(st.sampled_from(["a", "seed"]), scalars)
)
keys = st.sampled_from([
    "seed", "ctx-size", "predict", "temp", "device", "no-cuda-graphs", "override-kv", "model", "check", "config",
    "help", "generate", "soak", "nothing", "",
])  # fmt: skip


@settings_of_hypothesis(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.dictionaries(keys, values, max_size=4))
def test_whatever_a_file_says_is_taken_or_refused_by_name(seen, tmp_path, made):
    path = tmp_path / "drawn.toml"
    path.write_text(
        "".join(f"{json.dumps(key)} = {toml_of(value)}\n" for key, value in made.items()), "utf-8"
    )
    seen.clear()
    result = run("generate", *ASK, "--config", str(path))
    if result.exit_code == 0:
        assert seen
        return
    # A message in words, never a traceback: what it is about is the file, or one of its keys.
    assert isinstance(result.exception, SystemExit), made
    assert not seen
    said = result.output
    assert "drawn.toml" in said or any(key and key in said for key in made), (made, said)
