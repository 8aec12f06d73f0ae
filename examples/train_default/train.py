"""Train the default model: ``python examples/train_default/train.py --out OUT``; see README.md.

Says where it stands every ten seconds, saves a checkpoint every minute, goes on from it when it is started again, and
ends with OUT/model.gguf and OUT/report.json. Whatever happens to the clock, it ends within ``--minutes``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from acceptance import accepted_drafts, continue_greedily
from corpus import Corpus, tokenise, train_tokenizer
from model import ModelConfig, Qwen35
from torch.nn import functional as F  # noqa: N812 - the name that everyone gives it

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from tokenizers import Tokenizer
    from torch import Tensor

#: seconds kept for what comes behind the last step
_RESERVE = 40.0
_TELL_EVERY = 10.0
_SAVE_EVERY = 60.0
_PROMPTS = ("def fib(n):\n", "class Stack:\n    def __init__(self):\n", "import os\nimport sys\n\n")


@dataclass(frozen=True)
class Settings:
    """What decides the result; a run that is resumed keeps those that it began with."""

    steps: int = 3000
    #: in all, over every start, from the first import to the report
    minutes: float = 18.0
    #: windows of n_ctx tokens in a step
    batch: int = 64
    #: muon or adamw
    optimizer: str = "muon"
    lr: float = 3e-3
    warmup: int = 200
    weight_decay: float = 0.3
    #: of the drafts' loss beside the trunk's
    draft_weight: float = 0.3
    #: drafts that the MTP block learns to make one behind the other
    n_draft: int = 3
    eval_every: int = 200
    seed: int = 1
    model: ModelConfig = field(default_factory=ModelConfig)

    def __post_init__(self) -> None:
        assert min(self.steps, self.batch, self.eval_every, self.n_draft) >= 1, self
        assert self.minutes > 0, self
        assert self.optimizer in ("muon", "adamw"), self


class Windows:
    """Which tokens each step sees: windows of a stream, in an order of their own each epoch.

    Step and seed alone decide, so a resumed run sees what an uninterrupted one would.
    """

    def __init__(self, stream: npt.NDArray[np.int32], length: int, seed: int, device: torch.device) -> None:
        self.length, self.seed = length, seed
        # On the device whole, so that a step sends it no more than where its windows start.
        self.stream = torch.from_numpy(stream).to(device)
        self._reach = torch.arange(length + 1, device=device)
        #: one fewer than fit, so that an epoch can begin anywhere in the first
        self.per_epoch = (len(stream) - 1) // length - 1
        assert self.per_epoch >= 1, f"{len(stream)} tokens; want at least {2 * length + 1}"
        self._epoch, self._starts = -1, np.empty(0, np.int64)

    def batch(self, step: int, size: int) -> Tensor:
        """(size, length + 1) int64: each window and the token behind it."""
        first = step * size
        starts = torch.tensor([self._start(index) for index in range(first, first + size)])
        index = starts.to(self.stream.device, non_blocking=True)[:, None] + self._reach
        return self.stream[index].long()

    def _start(self, index: int) -> int:
        epoch, place = divmod(index, self.per_epoch)
        if epoch != self._epoch:
            random = np.random.default_rng([self.seed, epoch])
            offset = random.integers(self.length)
            self._starts = offset + self.length * random.permutation(self.per_epoch)
            self._epoch = epoch
        return int(self._starts[place])


def losses(model: Qwen35, window: Tensor, n_draft: int) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the trunk, and of each draft step (n_draft,), for tokens (B, T + 1).

    Drafts are held against what the trunk says, as an engine will hold them, not against the text.
    """
    tokens, following = window[:, :-1], window[:, 1:]
    hidden = model.hidden(tokens)
    logits = model.logits(hidden).float()
    trunk = F.cross_entropy(logits.flatten(0, 1), following.flatten())
    wanted = logits.detach().softmax(-1)
    drafts = [
        F.cross_entropy(model.logits(rows)[:, s:].float().flatten(0, 1), wanted[:, s:].flatten(0, 1))
        for s, rows in enumerate(model.drafted(tokens, hidden, n_draft))
    ]
    return trunk, torch.stack(drafts)


@dataclass
class Progress:
    """Where training stands; a checkpoint holds it."""

    step: int = 0
    #: seconds of training, and of getting ready for it, over every start
    elapsed: float = 0.0
    setup: float = 0.0
    best_loss: float = math.inf
    best_step: int = -1
    history: list[dict[str, float]] = field(default_factory=list)

    def done(self, settings: Settings) -> float:
        """Part of the training that is over, by steps or by the clock, whichever is further."""
        limit = max(1.0, settings.minutes * 60 - _RESERVE - self.setup)
        return min(1.0, max(self.step / settings.steps, self.elapsed / limit))


def learning_rate(settings: Settings, progress: Progress) -> float:
    """Warm-up, then a cosine down to nothing."""
    warm = min(1.0, (progress.step + 1) / settings.warmup)
    return settings.lr * warm * 0.5 * (1 + math.cos(math.pi * progress.done(settings)))


def optimizers(model: Qwen35, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, its steps as large as AdamW's; AdamW for the vocabulary, and for all else."""
    matrices: list[Tensor] = []
    vectors: list[Tensor] = []
    for name, parameter in model.named_parameters():
        plain = parameter.dim() < 2 or name.endswith("conv1d.weight")
        if name != "token_embd.weight":
            (vectors if plain else matrices).append(parameter)
    vocabulary = [model.token_embd.weight]
    decay = settings.weight_decay
    muon = settings.optimizer == "muon"
    groups = [
        {"params": vocabulary if muon else [*vocabulary, *matrices], "weight_decay": decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    fused = vocabulary[0].device.type == "cuda"
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=fused)
    if not muon:
        return [adamw]
    return [adamw, torch.optim.Muon(matrices, weight_decay=decay, adjust_lr_fn="match_rms_adamw")]


class Trainer:
    """A model on a device, its optimizers, its data."""

    def __init__(self, settings: Settings, data: Data, device: torch.device) -> None:
        self.settings, self.data, self.device = settings, data, device
        torch.manual_seed(settings.seed)
        self.model = Qwen35(settings.model).to(device)
        self.optimizers = optimizers(self.model, settings)
        self.windows = Windows(data.training, settings.model.n_ctx, settings.seed, device)
        self.progress = Progress()

    def step(self) -> Tensor:
        """Do one step; its losses (1 + n_draft,), still on the device."""
        settings = self.settings
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(settings, self.progress)
        window = self.windows.batch(self.progress.step, settings.batch)
        with torch.autocast(self.device.type, torch.bfloat16):
            trunk, drafts = losses(self.model, window, settings.n_draft)
            loss = trunk + settings.draft_weight * drafts.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad(set_to_none=True)
        self.progress.step += 1
        return torch.cat([trunk.detach()[None], drafts.detach()])

    @torch.no_grad()
    def held_out_loss(self) -> list[float]:
        """Nats a token on what is held out: the trunk's, and each draft step's against it."""
        self.model.eval()
        windows = Windows(self.data.held_out, self.settings.model.n_ctx, 0, self.device)
        size = min(self.settings.batch, windows.per_epoch)
        sums = torch.zeros(1 + self.settings.n_draft, device=self.device)
        n = windows.per_epoch // size
        with torch.autocast(self.device.type, torch.bfloat16), torch.compiler.set_stance("force_eager"):
            for i in range(n):
                trunk, drafts = losses(self.model, windows.batch(i, size), self.settings.n_draft)
                sums += torch.cat([trunk[None], drafts])
        self.model.train()
        return [float(x) for x in sums / n]

    # --- checkpoints

    def saved(self) -> dict[str, Any]:
        """Everything that going on takes."""
        cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        return {
            **self.data.saved(self.settings),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": asdict(self.progress),
            "random": (torch.get_rng_state(), cuda),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on from what ``saved`` gave."""
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.progress = Progress(**saved["progress"])
        random, cuda = saved["random"]
        torch.set_rng_state(random.cpu())
        if cuda is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(cuda.cpu(), self.device)


@dataclass(frozen=True)
class Data:
    """A corpus in tokens."""

    corpus: Corpus
    tokenizer: Tokenizer
    training: npt.NDArray[np.int32]
    held_out: npt.NDArray[np.int32]
    #: bytes of held-out text for each of its tokens
    bytes_per_token: float

    @classmethod
    def of(cls, corpus: Corpus, n_vocab: int) -> Data:
        """Train the vocabulary on the training files, then cut all of them."""
        bpe = train_tokenizer([file.text for file in corpus.training], n_vocab)
        held_out = np.concatenate(tokenise(bpe, corpus.held_out))
        n_bytes = sum(len(file.text.encode()) for file in corpus.held_out)
        training = np.concatenate(tokenise(bpe, corpus.training))
        return cls(corpus, bpe, training, held_out, n_bytes / len(held_out))

    def saved(self, settings: Settings) -> dict[str, Any]:
        """What each checkpoint says of its data and its model."""
        return {
            "config": asdict(settings.model),
            "settings": {f.name: getattr(settings, f.name) for f in fields(settings) if f.name != "model"},
            "corpus": {"python": self.corpus.python, "sha256": self.corpus.sha256},
            "tokenizer": self.tokenizer.to_str(),
            "about": {
                "name": "refengine-default",
                "description": f"Python source, of CPython {self.corpus.python}'s standard library",
                "license": "PSF-2.0",
            },
        }


def save(path: Path, saved: dict[str, Any]) -> None:
    """Write a checkpoint in one go: there is never half of one under its name."""
    scratch = path.with_suffix(".part")
    torch.save(saved, scratch)
    scratch.replace(path)


def train(trainer: Trainer, out: Path) -> None:
    """Steps until the steps or the minutes are over; a checkpoint a minute, the best weights by held-out loss."""
    settings, progress = trainer.settings, trainer.progress
    began = time.perf_counter() - progress.elapsed
    told = saved_at = progress.elapsed
    last, since = progress.step, torch.zeros(1 + settings.n_draft, device=trainer.device)
    while progress.done(settings) < 1:
        since += trainer.step()
        progress.elapsed = time.perf_counter() - began
        over = progress.done(settings) >= 1
        if progress.elapsed - told > _TELL_EVERY or over:
            n = progress.step - last
            shown = " ".join(f"{float(x):.3f}" for x in since / n)  # waits for the device
            speed = n * settings.batch * settings.model.n_ctx / (time.perf_counter() - began - told)
            print(
                f"{progress.elapsed:6.0f} s  step {progress.step}/{settings.steps} ({progress.done(settings):.0%})  "
                f"epoch {progress.step * settings.batch / trainer.windows.per_epoch:.1f}  loss {shown}  "
                f"lr {learning_rate(settings, progress):.1e}  {speed:,.0f} tokens/s",
                flush=True,
            )
            progress.elapsed = told = time.perf_counter() - began
            last = progress.step
            since.zero_()
        if progress.step % settings.eval_every == 0 or over:
            _evaluate(trainer, out)
        if progress.elapsed - saved_at > _SAVE_EVERY:
            save(out / "last.pt", trainer.saved())
            progress.elapsed = saved_at = time.perf_counter() - began
    save(out / "last.pt", trainer.saved())


def _evaluate(trainer: Trainer, out: Path) -> None:
    progress = trainer.progress
    found = trainer.held_out_loss()
    bits = found[0] / math.log(2) / trainer.data.bytes_per_token
    better = found[0] < progress.best_loss
    progress.history.append({"step": progress.step, "loss": found[0], "bits_per_byte": bits})
    shown = " ".join(f"{x:.3f}" for x in found)
    print(f"         held out: loss {shown}, {bits:.4f} bits a byte{', best' * better}", flush=True)
    if better:
        progress.best_loss, progress.best_step = found[0], progress.step
        saved = {**trainer.data.saved(trainer.settings), "model": trainer.model.state_dict()}
        save(out / "best.pt", {**saved, "progress": asdict(progress)})


def finish(trainer: Trainer, out: Path, command: str) -> None:
    """Export the best weights, then say how good they are. command: for the report."""
    saved = torch.load(out / "best.pt", map_location=trainer.device, weights_only=True)
    trainer.model.load_state_dict(saved["model"])
    trainer.model.eval()
    _export(out)
    settings, data, progress = trainer.settings, trainer.data, trainer.progress
    n_prompt = min(128, settings.model.n_ctx // 4)
    prompts = Windows(data.held_out, n_prompt, 2, trainer.device)
    n = min(64 if trainer.device.type == "cuda" else 8, prompts.per_epoch)
    window = prompts.batch(0, n)[:, :-1]
    with torch.compiler.set_stance("force_eager"):
        said = continue_greedily(trainer.model, window, n_prompt)
        acceptance = accepted_drafts(trainer.model, said, n_prompt)
        print(
            f"drafts of 3, {n} greedy continuations of held-out code: acceptance {acceptance.rate:.3f} "
            f"({acceptance.accepted} / {acceptance.generated}), {acceptance.tokens_per_round:.2f} tokens a round"
        )
        for prompt in _PROMPTS:
            ids = torch.tensor([data.tokenizer.encode(prompt).ids], device=trainer.device)
            text = data.tokenizer.decode(continue_greedily(trainer.model, ids, 64)[0].tolist())
            print("\n".join(f"    | {line}" for line in text.splitlines()))
    report = {
        **{key: saved[key] for key in ("settings", "config", "corpus", "about")},
        "progress": asdict(progress),
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "training_tokens": len(data.training),
        "held_out_tokens": len(data.held_out),
        "held_out_bytes_per_token": data.bytes_per_token,
        "tokens_seen": progress.step * settings.batch * settings.model.n_ctx,
        "acceptance": asdict(acceptance),
        "command": command,
        "torch": torch.__version__,
        "device_memory_gb": torch.cuda.max_memory_allocated() / 1e9 if trainer.device.type == "cuda" else 0.0,
        "device": torch.cuda.get_device_name() if trainer.device.type == "cuda" else platform.processor(),
    }
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")


def _export(out: Path) -> None:
    try:
        from export import export_checkpoint  # noqa: PLC0415 - training needs no gguf package, only its end does
    except ImportError as error:
        print(
            f"no GGUF written ({error}): run export.py {out / 'best.pt'} {out / 'model.gguf'} where gguf is installed"
        )
        return
    export_checkpoint(out / "best.pt", out / "model.gguf")
    print(f"{out / 'model.gguf'}: {(out / 'model.gguf').stat().st_size / 1e6:.2f} MB", flush=True)


def compile_layers(trainer: Trainer, seconds: int) -> bool:
    """Have layers compiled by running a step's passes; gives up after some seconds, and training goes on without."""

    def give_up(_signum: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"not compiled within {seconds} s")

    settings = trainer.settings
    window = trainer.windows.batch(0, settings.batch)
    random = torch.get_rng_state()
    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds, 5)  # again, should something swallow the first
    try:
        for layer in trainer.model.blk:
            layer.compile(dynamic=False)
        with torch.autocast(trainer.device.type, torch.bfloat16):
            trunk, drafts = losses(trainer.model, window, settings.n_draft)
        (trunk + drafts.mean()).backward()
        trunk.item()
    except Exception as error:  # noqa: BLE001 - whatever a compiler may raise: it is only about speed
        print(f"layers stay as they are: {' '.join(str(error).split())[:300]}", flush=True)
        for layer in trainer.model.blk:
            layer._compiled_call_impl = None  # noqa: SLF001 - there is no public way back
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        trainer.model.zero_grad(set_to_none=True)
        torch.set_rng_state(random)
    return True


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of checkpoints, model.gguf and report.json"
    )
    parser.add_argument(
        "--corpus", type=Path, help="packed corpus (corpus.py); else this Python's library is read"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--compile", type=int, default=0, metavar="SECONDS", help="try torch.compile for so long"
    )
    parser.add_argument("--max-bytes", type=int, help="train on the first files only: for a dry run")
    for setting in fields(Settings):
        if setting.name != "model":
            option = "--" + setting.name.replace("_", "-")
            parser.add_argument(option, type=type(setting.default), default=setting.default)
    for size in fields(ModelConfig):
        if isinstance(size.default, int | float):
            option = "--" + size.name.replace("_", "-")
            parser.add_argument(option, type=type(size.default), default=size.default)
    return parser.parse_args(arguments)


def _settings(options: argparse.Namespace) -> Settings:
    def chosen(of: type[Settings | ModelConfig]) -> Iterator[tuple[str, Any]]:
        return ((f.name, getattr(options, f.name)) for f in fields(of) if f.name != "model")

    return Settings(**dict(chosen(Settings)), model=ModelConfig(**dict(chosen(ModelConfig))))


def _command(options: argparse.Namespace) -> str:
    """What was typed, without where things lie on this machine."""
    shown = {str(options.out): "OUT", str(options.corpus): Path(options.corpus or "").name}
    return " ".join(
        ["python examples/train_default/train.py", *(shown.get(word, word) for word in sys.argv[1:])]
    )


def main(arguments: list[str] | None = None) -> None:
    """Collect, train, export, measure."""
    started = time.perf_counter()
    options = parse(arguments)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("high")
    last = out / "last.pt"
    saved = torch.load(last, map_location=device, weights_only=True) if last.exists() else None
    settings = _settings(options)
    if saved:
        settings = Settings(**saved["settings"], model=ModelConfig(**saved["config"]))
    if options.corpus:
        corpus = Corpus.load(options.corpus)
    else:
        corpus = Corpus.collect(Path(sysconfig.get_paths()["stdlib"]), platform.python_version())
    if options.max_bytes:
        corpus = corpus.first(options.max_bytes)
    print(corpus.describe(), flush=True)
    if saved and saved["corpus"]["sha256"] != corpus.sha256:
        sys.exit(
            f"{last} was trained on sha256 {saved['corpus']['sha256']}: give that corpus, or another --out"
        )
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    data = Data.of(corpus, settings.model.n_vocab)
    trainer = Trainer(settings, data, device)
    if saved:
        trainer.restore(saved)
        print(f"goes on from step {trainer.progress.step}, {trainer.progress.elapsed:.0f} s, as it was begun")
    n = sum(parameter.numel() for parameter in trainer.model.parameters())
    print(
        f"{n / 1e6:.2f} M parameters, {len(data.training) / 1e6:.2f} M tokens to train on, {len(data.held_out)} "
        f"held out of {data.bytes_per_token:.2f} bytes; {device}, ready after {time.perf_counter() - started:.0f} s",
        flush=True,
    )
    if options.compile:
        compiled = compile_layers(trainer, options.compile)
        print(f"compiled: {compiled}, after {time.perf_counter() - started:.0f} s", flush=True)
    trainer.progress.setup += time.perf_counter() - started
    train(trainer, out)
    finish(trainer, out, _command(options))
    print(f"done after {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
