"""Flags of llama.cpp that people will try here, and what to do instead."""

from __future__ import annotations

from cli.command import Refused

_ONE_DEVICE = "the whole model runs on one device; choose it with --device"
_ONE_ATTENTION = "there is one attention, whose result does not depend on the batch; leave it out"
_LOADING = "weights are read once into guarded memory, and the file is closed; leave it out"
_METADATA = "not built yet; change the model's own value with --override-kv"
_ADAPTERS = "adapters are not built yet; merge it into the model"
_CONSTRAINTS = "constrained sampling is not built yet; leave it out"
_SAMPLERS = "this sampler is not built yet; see --help for those that are"
_CHAT = "conversations are not built yet; use --single-turn with --system-prompt"
_TEMPLATE = (
    "the model's own chat template is used; set another with --override-kv tokenizer.chat_template=str:..."
)
_DRAFT_MODEL = "separate draft models are not built; draft-mtp uses the model's own head"
_FETCH = "models are not fetched; give a file with --model"
_THREADS = "not built yet; --threads is all there is"
_RAW = "prompts are taken byte for byte; write the characters themselves, or use --file"
_CACHE_FILE = "prompt caches on disk are not built yet; leave it out"

REFUSED = (
    Refused(("-ngl", "--gpu-layers", "--n-gpu-layers"), _ONE_DEVICE),
    Refused(("-sm", "--split-mode"), _ONE_DEVICE),
    Refused(("-ts", "--tensor-split"), _ONE_DEVICE),
    Refused(("-mg", "--main-gpu"), _ONE_DEVICE),
    Refused(("-ot", "--override-tensor"), _ONE_DEVICE),
    Refused(("-cmoe", "--cpu-moe"), _ONE_DEVICE),
    Refused(("-ncmoe", "--n-cpu-moe"), _ONE_DEVICE),
    Refused(("-nkvo", "--no-kv-offload"), _ONE_DEVICE),
    Refused(("--no-op-offload",), _ONE_DEVICE),
    Refused(("--rpc",), _ONE_DEVICE),
    Refused(("-fa", "--flash-attn"), _ONE_ATTENTION),
    Refused(("--mlock",), _LOADING),
    Refused(("--mmap",), _LOADING),
    Refused(("--no-mmap",), _LOADING),
    Refused(("--no-repack",), _LOADING),
    Refused(("--numa",), _THREADS),
    Refused(("-tb", "--threads-batch"), _THREADS),
    Refused(("-C", "--cpu-mask"), _THREADS),
    Refused(("--prio",), _THREADS),
    Refused(("--lora", "--lora-scaled"), _ADAPTERS),
    Refused(("--control-vector", "--control-vector-scaled"), _ADAPTERS),
    Refused(("--grammar", "--grammar-file"), _CONSTRAINTS),
    Refused(("-j", "--json-schema"), _CONSTRAINTS),
    Refused(("-l", "--logit-bias"), _CONSTRAINTS),
    Refused(("--samplers",), "the order is fixed: penalties, top-k, typical, top-p, min-p, temperature"),
    Refused(("--sampling-seq", "--sampler-seq"), "the order is fixed; leave it out"),
    Refused(("--mirostat", "--mirostat-lr", "--mirostat-ent"), _SAMPLERS),
    Refused(("--dry-multiplier", "--dry-base", "--dry-allowed-length"), _SAMPLERS),
    Refused(("--xtc-probability", "--xtc-threshold"), _SAMPLERS),
    Refused(("--top-nsigma", "--top-n-sigma"), _SAMPLERS),
    Refused(("--dynatemp-range", "--dynatemp-exp"), _SAMPLERS),
    Refused(
        ("-kvu", "--kv-unified"), "one prompt has one sequence, which may use the whole cache; leave it out"
    ),
    Refused(
        ("--context-shift",),
        "moving the context would change its results; use a larger --ctx-size, or fewer --predict",
    ),
    Refused(("--keep",), "the context is never shifted; leave it out"),
    Refused(("--rope-scaling", "--rope-scale"), _METADATA),
    Refused(("--rope-freq-base", "--rope-freq-scale"), _METADATA),
    Refused(("--yarn-orig-ctx", "--yarn-ext-factor", "--yarn-attn-factor"), _METADATA),
    Refused(("--draft", "--draft-n", "--draft-max"), "was replaced by --spec-draft-n-max"),
    Refused(("--draft-min", "--draft-n-min"), "was replaced by --spec-draft-n-min"),
    Refused(("-md", "--model-draft", "--spec-draft-model"), _DRAFT_MODEL),
    Refused(("-cnv", "--conversation"), _CHAT),
    Refused(("-i", "--interactive"), _CHAT),
    Refused(("-mli", "--multiline-input"), _CHAT),
    Refused(("-r", "--reverse-prompt"), "stop words are not built yet; use --predict"),
    Refused(("--chat-template", "--chat-template-file"), _TEMPLATE),
    Refused(("-hf", "--hf-repo"), _FETCH),
    Refused(("-mu", "--model-url"), _FETCH),
    Refused(("-e", "--escape"), _RAW),
    Refused(("--prompt-cache", "--prompt-cache-all", "--prompt-cache-ro"), _CACHE_FILE),
)
