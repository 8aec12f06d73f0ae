"""The example that trains the default model: PyTorch, the exported file and refengine agree."""

import json

import numpy as np
import pytest
import tiny_default
from engines import nmse

import refengine

torch = pytest.importorskip("torch")

import corpus  # noqa: E402 - beside the example's files, all of which need PyTorch
import delta  # noqa: E402
import model  # noqa: E402
import train  # noqa: E402
from acceptance import accepted_drafts, continue_greedily  # noqa: E402
from export import export  # noqa: E402
from gguf import GGMLQuantizationType  # noqa: E402

torch.set_num_threads(1)  # products this small only wait for other threads
ENGINE = {"device": "host", "threads": 1, "cache_type_k": "f32", "cache_type_v": "f32", "n_ctx": 128}


def delta_arguments(n_tokens, dtype):
    """Keys that resemble each other and decays of all sizes: where inverting a chunk's matrix would go wrong first."""
    random = torch.Generator().manual_seed(n_tokens)
    shape = (2, n_tokens, 3)
    q, v, k = (torch.randn(*shape, 16, generator=random, dtype=torch.float64) for _ in range(3))
    k = 0.2 * k + torch.randn(1, 1, 3, 16, generator=random, dtype=torch.float64)
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    g = -(torch.rand(shape, generator=random, dtype=torch.float64) ** 8) * 5
    beta = torch.rand(shape, generator=random, dtype=torch.float64) ** 0.1
    return [x.to(dtype).requires_grad_() for x in (q, k, v, g, beta)]


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-26), (torch.float32, 1e-10)], ids=str)
@pytest.mark.parametrize("n_tokens", [1, 63, 64, 65, 200])
def test_chunks_give_what_steps_give_and_the_same_gradients(n_tokens, dtype, close):
    chunked, stepped = delta_arguments(n_tokens, dtype), delta_arguments(n_tokens, torch.float64)
    found, wanted = delta.delta_rule(*chunked), delta.delta_rule_by_steps(*stepped)
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (found * weight).sum().backward()
    (wanted * weight).sum().backward()
    assert nmse(found.detach().numpy(), wanted.detach().numpy()) <= close
    for x, y in zip(chunked, stepped, strict=True):
        assert nmse(x.grad.numpy(), y.grad.numpy()) <= close * 10


@pytest.mark.parametrize(
    "matrices", [GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0], ids=lambda t: t.name
)
def test_exported_model_computes_what_pytorch_computes(tmp_path, matrices):
    made, tokens = tiny_default.model(), tiny_default.tokens()
    export(tmp_path / "m.gguf", made.state_dict(), made.config, tiny_default.tokenizer(), matrices=matrices)
    if matrices == GGMLQuantizationType.Q8_0:
        tiny_default.rounded(made)
    wanted = tiny_default.outputs(made, tokens)
    with refengine.load(tmp_path / "m.gguf", spec_type="draft-mtp", **ENGINE) as engine:
        for name, array in wanted.items():
            assert nmse(getattr(engine, name)(tokens.tolist()), array) <= 1e-9, name


def test_rounding_to_q8_0_costs_little():
    """At the scale that training begins with: the tiny model above, which is not, is chaotic on purpose."""
    torch.manual_seed(0)
    exact = model.Qwen35(tiny_default.model().config).eval()
    wanted = tiny_default.outputs(exact, tiny_default.tokens())
    tiny_default.rounded(exact)
    found = tiny_default.outputs(exact, tiny_default.tokens())
    for name, array in wanted.items():
        assert 0 < nmse(found[name], array) <= 2e-4, name


def test_acceptance_is_counted_as_the_engine_counts(tmp_path):
    """A model that says what it read a few tokens ago: its head agrees with it now and then, not always."""
    made = tiny_default.model(seed=3)
    with torch.no_grad():  # a trunk that mostly repeats, a head that mostly sees the token
        for layer in made.blk:
            layer.ffn_down.weight.mul_(0.1)
    bpe = tiny_default.tokenizer()
    export(tmp_path / "m.gguf", made.state_dict(), made.config, bpe, matrices=GGMLQuantizationType.F32)
    counts = set()
    with refengine.load(tmp_path / "m.gguf", spec_type="draft-mtp", draft_n_max=3, **ENGINE) as engine:
        for prompt in ("def", "return self", "raise", "closed('"):
            ids = bpe.encode(prompt).ids
            said = engine.generate(prompt, n_predict=60, temperature=0, ignore_eos=True)
            tokens = continue_greedily(made, torch.tensor([ids]), 60)
            assert said.prompt_tokens == ids
            assert tokens[0, len(ids) :].tolist() == said.tokens
            found = accepted_drafts(made, tokens, len(ids))
            # The engine's last draft is cut to what is still asked for; the count stops before it.
            assert 0 <= said.draft.accepted - found.accepted <= 3
            assert 0 <= said.draft.generated - found.generated <= 6
            counts.add(found.accepted)
    assert len(counts) > 1, "every text alike: this shows nothing"


# --- training


def sizes():
    return tiny_default.model().config


def data():
    files = tuple(
        corpus.SourceFile(f"{i}.py", tiny_default.TEXT.replace("read", f"read{i}") * 12) for i in range(120)
    )
    return train.Data.of(corpus.Corpus("3.99", files), tiny_default.N_VOCAB)


def trainer(**changes):
    defaults = {"steps": 8, "batch": 2, "warmup": 2, "eval_every": 100, "minutes": 60.0, "model": sizes()}
    return train.Trainer(train.Settings(**(defaults | changes)), data(), torch.device("cpu"))


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path, optimizer):
    whole = trainer(optimizer=optimizer)
    losses = [whole.step() for _ in range(8)]
    assert float(losses[-1][0]) < float(losses[0][0])

    begun = trainer(optimizer=optimizer)
    for _ in range(3):
        begun.step()
    train.save(tmp_path / "last.pt", begun.saved())
    resumed = trainer(optimizer=optimizer)
    resumed.restore(torch.load(tmp_path / "last.pt", weights_only=True))
    for _ in range(5):
        resumed.step()
    wanted = whole.model.state_dict()
    for name, parameter in resumed.model.state_dict().items():
        assert torch.equal(parameter, wanted[name]), name


def test_windows_cover_an_epoch_once_and_differ_between_epochs():
    stream = np.arange(1000, dtype=np.int32)
    windows = train.Windows(stream, 64, 3, torch.device("cpu"))
    starts = np.concatenate([windows.batch(step, 7)[:, 0] for step in range(2 * windows.per_epoch)])
    epochs = starts[: windows.per_epoch * 14].reshape(-1, windows.per_epoch)
    for epoch in epochs:
        assert sorted(epoch) == list(range(epoch.min(), epoch.min() + 64 * windows.per_epoch, 64))
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)
    assert torch.equal(train.Windows(stream, 64, 3, torch.device("cpu")).batch(5, 7), windows.batch(5, 7))


def test_the_clock_ends_training_and_takes_the_learning_rate_down_with_it():
    settings = train.Settings(steps=1000, minutes=10.0, warmup=1)
    rates = [
        train.learning_rate(settings, train.Progress(step=10, elapsed=seconds))
        for seconds in (0.0, 280.0, 560.0)
    ]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(0.0)
    assert train.Progress(step=10, elapsed=560.0).done(settings) == 1.0


def test_command_ends_with_a_model_and_goes_on_where_it_stopped(tmp_path, capsys):
    made = data()
    made.corpus.save(tmp_path / "corpus.jsonl.xz")
    sizes_of = {
        name: getattr(sizes(), name)
        for name in ("n_embd", "n_layer", "n_ff", "n_head", "n_head_kv", "head_dim")
    }
    sizes_of |= {
        "n_rot": 8,
        "state_size": 16,
        "n_key_head": 2,
        "n_value_head": 4,
        "n_ctx": 128,
        "n_vocab": 300,
    }
    options = [
        word for name, value in sizes_of.items() for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    options += [
        "--out",
        str(tmp_path / "out"),
        "--corpus",
        str(tmp_path / "corpus.jsonl.xz"),
        "--device",
        "cpu",
    ]
    train.main([*options, "--steps", "4", "--batch", "2", "--eval-every", "2"])
    with refengine.load(tmp_path / "out" / "model.gguf", spec_type="draft-mtp", **ENGINE) as engine:
        assert len(engine.generate("def", n_predict=5, temperature=0, ignore_eos=True).tokens) == 5
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["corpus"] == {"python": "3.99", "sha256": made.corpus.sha256}
    assert report["progress"]["step"] == 4
    assert report["acceptance"]["generated"] > 0
    capsys.readouterr()
    train.main(options)  # nothing is left to do: it exports again
    assert "goes on from step 4" in capsys.readouterr().out
