"""``refengine generate``: what comes out, and how it ends."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
from fake_cuda import fake_device

import refengine
from instrumentation.ownership import Owner
from refengine.context import Context
from refengine.engine import Engine
from refengine.weights import Weights

DATA = Path(__file__).resolve().parent.parent / "data"
GREEDY = ("--temp", "0")


@pytest.fixture
def loaded(monkeypatch):
    """Engines that the command loads, and a place for what is done to each."""
    engines = []

    def load(*args, **kwargs):
        engines.append(refengine_load(*args, **kwargs))
        for change in engines_changes:
            change(engines[-1])
        return engines[-1]

    refengine_load, engines_changes = refengine.load, []
    monkeypatch.setattr(refengine, "load", load, raising=False)
    return engines, engines_changes


# --- what comes out


def test_stdout_is_the_generated_text_and_nothing_else(generate, engine):
    expected = engine.generate("the in an", n_predict=24, temperature=0, ignore_eos=True)
    result = generate("-p", "the in an", "-n", "24", "--ignore-eos", *GREEDY)
    assert result.exit_code == 0, result.stderr
    assert result.stdout_bytes == expected.text.encode()
    assert len(expected.tokens) == 24


def test_sampling_options_reach_the_sampler(generate, engine):
    options = {
        "temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95, "repeat_last_n": 8,
        "repeat_penalty": 1.2, "frequency_penalty": 0.1, "presence_penalty": 0.2, "seed": 5,
    }  # fmt: skip
    flags = {"temperature": "temp", "typical_p": "typical"}
    given = [f"--{flags.get(name, name).replace('_', '-')}={value}" for name, value in options.items()]
    result = generate("-p", "the", "-n", "16", *given)
    assert result.stdout_bytes == engine.generate("the", n_predict=16, **options).text.encode()


def test_a_seed_reproduces_a_run_and_the_summary_names_one_that_was_drawn(generate):
    args = ("-p", "the", "-n", "16", "--temp", "2", "--top-k", "0", "--min-p", "0", "--ignore-eos")
    drawn = generate(*args)
    seed = re.search(r"^seed: (\d+)$", drawn.stderr, re.MULTILINE)[1]
    assert generate(*args, "-s", seed).stdout_bytes == drawn.stdout_bytes
    assert generate(*args, "-s", str(int(seed) ^ 1)).stdout_bytes != drawn.stdout_bytes


def test_every_place_for_a_prompt_takes_its_bytes_as_they_are(generate, engine, tmp_path):
    prompt = b"th\xff in\nthe\xe6\x97"
    expected = engine.generate(prompt, n_predict=8, temperature=0).text.encode()
    file = tmp_path / "prompt"
    file.write_bytes(prompt)
    as_argument = prompt.decode("utf-8", "surrogateescape")
    for args, stdin in (
        (["-p", as_argument], None), (["-f", file], None), (["-p", "-"], prompt), (["-f", "-"], prompt),
    ):  # fmt: skip
        result = generate(*args, "-n", "8", *GREEDY, stdin=stdin)
        assert result.exit_code == 0, result.stderr
        assert result.stdout_bytes == expected


def test_options_of_the_context_change_nothing_in_the_text(generate):
    args = ("-p", "the in an the in", "-n", "8", *GREEDY)
    texts = {
        generate(*args, *more).stdout_bytes for more in ([], ["-b", "3"], ["-ub", "2"], ["--no-cuda-graphs"])
    }
    assert len(texts) == 1


def test_a_single_turn_goes_through_the_chat_template(generate, engine):
    template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }} {% endfor %}"
    override = ("--override-kv", f"tokenizer.chat_template=str:{template}")
    expected = engine.generate("uthe ", n_predict=8, temperature=0).text.encode()
    assert generate("-st", "-p", "the", "-n", "8", *GREEDY, *override).stdout_bytes == expected
    expected = engine.generate("san uthe ", n_predict=8, temperature=0).text.encode()
    assert (
        generate("-sys", "an", "--jinja", "-p", "the", "-n", "8", *GREEDY, *override).stdout_bytes == expected
    )


def test_bytes_that_are_not_utf8_survive_the_chat_template(generate, engine):
    override = ("--override-kv", "tokenizer.chat_template=str:{{ messages[0].content }}")
    expected = engine.generate(b"th\xff", n_predict=4, temperature=0).text.encode()
    assert generate("-st", "-f", "-", "-n", "4", *GREEDY, *override, stdin=b"th\xff").stdout_bytes == expected


# --- the summary


def test_the_summary_has_tokens_rates_and_memory(generate):
    result = generate("-p", "the in an", "-n", "5", "--ignore-eos", "-s", "3")
    lines = result.stderr.splitlines()
    assert lines[0] == "seed: 3"
    number = r" +\d+\.\d\d"
    rates = rf"\({number} ms per token,{number} tokens per second\)"
    assert re.fullmatch(rf"prompt eval time ={number} ms / +\d+ tokens {rates}", lines[1])
    assert re.fullmatch(rf" +eval time ={number} ms / +4 runs   {rates}", lines[2])
    peak = re.fullmatch(
        r"memory peak: \S+ [KM]iB reserved \((\d+) bytes\), \S+ [KM]iB used \((\d+) bytes\), device host",
        lines[3],
    )
    assert 0 < int(peak[2]) <= int(peak[1])
    assert len(lines) == 4, "level off without findings says nothing of findings"


def test_on_a_gpu_the_summary_ends_with_what_the_driver_holds(run, monkeypatch):
    device = fake_device()
    device.context.driver.graph_nbytes = 2 << 20
    monkeypatch.setattr(refengine.engine, "open_device", lambda *_, **__: device)
    result = run(
        "generate", "-m", DATA / "llama.gguf", "-c", "256", "-p", "the in an", "-n", "3", "--ignore-eos"
    )
    assert result.exit_code == 0, result.stderr
    *_, last = result.stderr.splitlines()
    assert last == (
        "beside arenas: 2 captured graphs 4.0 MiB, loaded kernels 0 B, page-locked 1.2 MiB of the host"
    )


def test_quiet_says_nothing(generate):
    result = generate("-p", "the", "-n", "2", "-q")
    assert (result.exit_code, result.stderr) == (0, "")


def test_guard_counts_its_findings(generate):
    result = generate("-p", "the", "-n", "2", "-q", "--check", "guard")
    assert (result.exit_code, result.stderr) == (0, "0 findings\n")


# --- findings


def test_a_damaged_canary_is_rendered_and_ends_with_1(generate, loaded):
    def damage(engine):
        buffer = engine.weights.buffers[0]
        ctypes.memset(buffer.address + buffer.nbytes, 0, 3)

    loaded[1].append(damage)
    result = generate("-p", "the", "-n", "2", "--check", "guard", "-q")
    assert result.exit_code == 1
    assert "MEM002" in result.stderr
    assert "weight.token_embd.weight" in result.stderr
    assert result.stderr.endswith("\n1 finding\n")
    assert "Traceback" not in result.stderr


def test_checked_kernels_write_the_same_text_and_find_nothing(generate, engine):
    expected = engine.generate("the in an", n_predict=6, temperature=0).text.encode()
    result = generate("-p", "the in an", "-n", "6", "-q", "--check", "trap", *GREEDY)
    assert (result.exit_code, result.stdout_bytes) == (0, expected)


@pytest.mark.parametrize("level", ["off", "guard"])
def test_a_leak_is_a_finding_too(generate, loaded, level):
    def leak(engine):
        engine.kept = engine.allocator.reserve_arena(512, owner=Owner("test"), name="forgotten").unwrap()

    loaded[1].append(leak)
    result = generate("-p", "the", "-n", "2", "-q", "--check", level)
    assert result.exit_code == 1
    assert "MEM006" in result.stderr
    assert "forgotten" in result.stderr
    assert loaded[0][0].allocator.snapshot().reserved == 0


# --- bad input


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        ([], 2, "no prompt; give one of -p/--prompt and -f/--file"),
        (["-p", "a", "-f", "b"], 2, "two prompts"),
        (["-p", ""], 2, "the prompt is empty"),
        (["-f", "/no/such/file"], 2, "-f/--file /no/such/file: cannot be read: No such file"),
        (["-f", "/"], 2, "cannot be read"),
        (["-f", "a\0b"], 2, "cannot be read"),
        (["-p", "a", "-n", "0"], 2, "-n/--predict is 0"),
        (["-p", "a", "-n", "-2"], 2, "-n/--predict is -2"),
        (["-p", "a", "-n", "x"], 2, "'x' is not a valid integer"),
        (["-p", "a", "b"], 2, "unexpected extra argument"),
        (["-p", "a", "-c", "-1"], 2, "n_ctx is -1"),
        (["-p", "a", "-c", "99999"], 2, "n_ctx is 99999"),
        (["-p", "a", "-b", "0"], 2, "n_batch is 0"),
        (["-p", "a", "-ub", "0"], 2, "n_ubatch is 0"),
        (["-p", "a", "-ctk", "q4"], 2, "cache_type_k 'q4' is unknown; use one of f32, f16, bf16, q8_0"),
        (["-p", "a", "-ctv", "q8_0"], 2, "cache_type_v q8_0: rows are stored in blocks of 32"),
        (["-p", "a", "-t", "0"], 2, "threads is 0"),
        (["-p", "a", "-dev", "tpu"], 2, "'tpu'"),
        (["-p", "a", "--gemm", "mkl"], 2, "gemm 'mkl' is unknown; use one of kernels, cublas"),
        (
            ["-p", "a", "--gemm", "cublas", "-dev", "host"],
            2,
            "device host has no cuBLAS; use device cuda, or gemm kernels",
        ),
        (["-p", "a", "--schedule-seed", "-1"], 2, "schedule_seed is -1; give a whole number from 0"),
        (["-p", "a", "--schedule-seed", "1", "-dev", "cuda"], 2, "of the host device, not of cuda"),
        (["-p", "a", "--schedule-seed", "1", "-dev", "auto"], 2, "use device host with it"),
        (["-p", "a", "--check", "most"], 2, "check level 'most'"),
        (["-p", "a", "--temp", "nan"], 2, "temperature is nan"),
        (["-p", "a", "--top-p", "1.5"], 2, "top_p is 1.5"),
        (["-p", "a", "-s", "-2"], 2, "seed is -2"),
        (["-p", "a", "--override-kv", "x"], 2, "--override-kv 'x'"),
        (["-p", "a", "--override-kv", "llama.block_count=int:9"], 2, "blk.4."),
        (["-p", "a", "--device-memory-limit", "1MB"], 2, "--device-memory-limit '1MB'"),
        (["-p", "a", "--log-format", "xml"], 2, "--log-format"),
        (["-p", "a", "-st"], 2, "no chat template"),
        (["-p", "a", "-sys", "b"], 2, "no chat template"),
        (["-p", "a", "-st", "--override-kv", "tokenizer.chat_template=str:{% x %}"], 2, "chat_template"),
        (["-p", "a", "--device-memory-limit", "64KiB"], 3, "of which weights of model"),
        (["-p", "a", "--device-memory-limit", "700KiB"], 3, "the smallest limit that works is"),
        (["-p", "the " * 200], 3, "exceeds the available context size (256 tokens), try increasing it"),
    ],
)
def test_bad_input_is_one_line(generate, one_line, args, code, text):
    result = generate(*args)
    assert text in one_line(result, code)
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            "/no/such.gguf",
            "model '/no/such.gguf': no such file; give a GGUF file or one of: default, smollm2",
        ),
        ("", "model '': no such file"),
        ("a\nb\0", "model 'a\\nb\\x00'"),
        ("/", "is a directory"),
        ("/dev/null", "is not a regular file"),
    ],
)
def test_a_model_that_is_none_is_one_line(generate, one_line, model, text):
    assert text in one_line(generate("-p", "a", model=model), 2)


def test_bad_options_are_refused_before_weights_are_loaded(generate, one_line, monkeypatch):
    monkeypatch.setattr(refengine, "load", None, raising=False)
    for args in (["--temp", "nan"], ["-n", "0"], ["-b", "0"], ["--override-kv", "x"], ["--spec-type", "x"]):
        one_line(generate("-p", "a", *args), 2)


def test_a_context_that_fills_up_ends_the_request_after_its_text(generate, engine):
    result = generate("-p", "the", "--ignore-eos", "-c", "16", *GREEDY)
    assert result.exit_code == 3
    assert result.stderr == "refengine: error: Context size has been exceeded.\n"
    n = 16 - len(engine.tokenizer.encode("the")) + 1
    assert (
        result.stdout_bytes
        == engine.generate("the", n_predict=n, temperature=0, ignore_eos=True).text.encode()
    )


# --- what goes wrong on the way


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (RuntimeError("x"), 1), (BrokenPipeError(), 141)]
)
@pytest.mark.parametrize("level", ["off", "guard"])
def test_whatever_happens_the_memory_is_given_back(generate, loaded, monkeypatch, error, code, level):
    decode = Context.decode
    calls = []

    def fails_later(self, batch):
        calls.append(batch)
        if len(calls) == 4:
            raise error
        return decode(self, batch)

    monkeypatch.setattr(Context, "decode", fails_later)
    result = generate("-p", "the", "-n", "9", "--ignore-eos", "-q", "--check", level)
    assert result.exit_code == code
    assert len(calls) == 4
    [engine] = loaded[0]
    assert engine.allocator.snapshot().reserved == 0
    assert engine.findings == []
    assert "Traceback" not in result.stderr


def test_an_interrupt_while_loading_gives_the_memory_back(generate, monkeypatch):
    seen = []

    def interrupted(self, _stream, _progress=None):
        seen.append(self.arena.heap)
        raise KeyboardInterrupt

    monkeypatch.setattr(Weights, "load", interrupted)
    result = generate("-p", "the", "-n", "9")
    assert (result.exit_code, result.stderr) == (130, "refengine: interrupted\n")
    assert [heap.ledger.reserved for heap in seen] == [0]


def test_an_output_that_is_full_is_one_line(generate, one_line, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")
        yield

    monkeypatch.setattr(Engine, "stream", full)
    assert "No space left on device" in one_line(generate("-p", "the"), 2)


def test_a_schedule_seed_changes_no_word(generate):
    usual = generate("-p", "the", "-n", "8", "-s", "1")
    fuzzed = generate(
        "-p", "the", "-n", "8", "-s", "1", "--schedule-seed", "5", "--check", "audit", "-dev", "host"
    )
    assert (usual.exit_code, fuzzed.exit_code) == (0, 0)
    assert usual.stdout == fuzzed.stdout != ""
