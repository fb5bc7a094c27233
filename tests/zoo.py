"""Models of others, unmodified, with small random configurations: whether they are captured and equal, and what they move.

``python -m tests.zoo [--only TEXT] [--jobs N] [--page] > docs/models.md``. Results are kept in out/zoo.json, each with the hash
of the sources that it holds for; what is missing is run first, then what is of older sources.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tabulate import tabulate
from torch import nn

from autopar.capture import capture
from autopar.compare import TOLERANCE
from autopar.compiler import Compiled, compile_program
from autopar.errors import AutoparError
from autopar.inspect.tables import collective_rows
from autopar.layout.mesh import Mesh
from autopar.layout.traffic import bytes_sent
from autopar.plan.plan import Plan
from autopar.rules import DEFAULT
from tests.equality.cases import IGNORE, ROWS, Case, Model, text
from tests.matrix import source_hash

#: sizes at which the plan is the realistic one; they are compiled on meta and never run.
HIDDEN, HEADS, VOCAB, SEQUENCE, BATCH = 2048, 16, 32000, 1024, 8


@dataclass(frozen=True)
class Zoo(Model):
    """A model at two sizes. ``large(layers)`` → module, ``large_batch()`` → global batch: for looking at what is moved.

    Attributes:
        known: what a layer needs by hand: for every stream of hidden states the all-reduces over ``tp`` forward and backward, and tokens.
        why: of what that is made.
        more: why more is moved, where it is; and by how much at most, as a share of what is known.
    """

    large: Callable[[int], nn.Module] | None = None
    large_batch: Callable[[], Any] | None = None
    known: tuple[tuple[int, int, int], ...] = ((2, 2, BATCH * SEQUENCE),)
    why: str = "attention, MLP"
    more: tuple[str, float] = ("", 0.0)


def _causal(
    name: str, kind: str, small: dict[str, Any], large: dict[str, Any], dropout: tuple[str, ...] = (), vocab: int = 96, **options: Any
) -> Zoo:
    """A causal language model of transformers by the name of its configuration."""
    config, model = getattr(hf, f"{kind}Config"), getattr(hf, f"{kind}ForCausalLM")

    def build(p: float) -> nn.Module:
        return model(config(vocab_size=vocab, use_cache=False, **small, **dict.fromkeys(dropout, p)))

    def wide(layers: int) -> nn.Module:
        return model(config(**{"vocab_size": VOCAB, "use_cache": False, **large, _layers(config): layers}, **dict.fromkeys(dropout, 0.0)))

    return Zoo(name, build, lambda g: text(g, vocab), dropout=bool(dropout), large=wide, large_batch=_large_text, **options)


def _layers(config: Any) -> str:
    return config.attribute_map.get("num_hidden_layers", "num_hidden_layers")


def _large_text() -> Any:
    ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


SMALL = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32)
LARGE = dict(hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_attention_heads=HEADS, max_position_embeddings=SEQUENCE)
KV = dict(num_key_value_heads=2, head_dim=8)
KV_LARGE = dict(num_key_value_heads=8, head_dim=128)


def _bert() -> Zoo:
    def build(p: float) -> nn.Module:
        return hf.BertForMaskedLM(hf.BertConfig(vocab_size=97, **SMALL, hidden_dropout_prob=p, attention_probs_dropout_prob=p))

    def batch(g: torch.Generator) -> Any:
        """Ragged rows, and labels where something is masked out."""
        ids = torch.randint(97, (ROWS, 8), generator=g)
        masked = torch.rand(ROWS, 8, generator=g) < 0.4
        length = torch.randint(4, 9, (ROWS, 1), generator=g)
        there = torch.arange(8) < length
        return {"input_ids": ids.masked_fill(masked, 3), "attention_mask": there.long(), "token_type_ids": (ids > 50).long(),
                "labels": ids.masked_fill(~masked | ~there, IGNORE)}  # fmt: skip

    def wide(layers: int) -> nn.Module:
        return hf.BertForMaskedLM(hf.BertConfig(vocab_size=30522, **LARGE, num_hidden_layers=layers, hidden_dropout_prob=0.0,
                                                attention_probs_dropout_prob=0.0))  # fmt: skip

    def wide_batch() -> Any:
        ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": ids, "token_type_ids": ids, "labels": ids}

    return Zoo("BERT", build, batch, large=wide, large_batch=wide_batch)


def _vit() -> Zoo:
    def config(**sizes: Any) -> Any:
        return hf.ViTConfig(**sizes, num_labels=10)

    def build(p: float) -> nn.Module:
        sizes = {k: v for k, v in SMALL.items() if k != "max_position_embeddings"}
        return hf.ViTForImageClassification(
            config(**sizes, image_size=8, patch_size=4, hidden_dropout_prob=p, attention_probs_dropout_prob=p)
        )

    def batch(g: torch.Generator) -> Any:
        return {"pixel_values": torch.randn(ROWS, 3, 8, 8, generator=g), "labels": torch.randint(10, (ROWS,), generator=g)}

    def wide(layers: int) -> nn.Module:
        sizes = {k: v for k, v in LARGE.items() if k != "max_position_embeddings"}
        return hf.ViTForImageClassification(config(**sizes, num_hidden_layers=layers, image_size=224, patch_size=16))

    def wide_batch() -> Any:
        return {"pixel_values": torch.zeros(BATCH, 3, 224, 224), "labels": torch.zeros(BATCH, dtype=torch.long)}

    return Zoo("ViT", build, batch, large=wide, large_batch=wide_batch, known=((2, 2, BATCH * 197),))


def _t5() -> Zoo:
    def build(p: float) -> nn.Module:
        return hf.T5ForConditionalGeneration(hf.T5Config(
            vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4, dropout_rate=p, use_cache=False,
            decoder_start_token_id=0, relative_attention_num_buckets=8, relative_attention_max_distance=16))  # fmt: skip

    def batch(g: torch.Generator) -> Any:
        """As many tokens in as out would hide a mix-up of the two."""
        made = text(g, 96, 6)
        ids = torch.randint(96, (ROWS, 8), generator=g)
        there = torch.arange(8) < torch.randint(4, 9, (ROWS, 1), generator=g)
        return {"input_ids": ids, "attention_mask": there.long(), "labels": made["labels"]}

    def wide(layers: int) -> nn.Module:
        return hf.T5ForConditionalGeneration(hf.T5Config(
            vocab_size=VOCAB, d_model=HIDDEN, d_kv=128, d_ff=4 * HIDDEN, num_layers=layers, num_decoder_layers=layers, num_heads=HEADS,
            dropout_rate=0.0, use_cache=False, decoder_start_token_id=0))  # fmt: skip

    def wide_batch() -> Any:
        ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": ids, "labels": ids}

    return Zoo("T5", build, batch, large=wide, large_batch=wide_batch, known=((5, 5, BATCH * SEQUENCE),),
               why="encoder: attention, MLP; decoder: attention, cross attention, MLP")  # fmt: skip


def _whisper() -> Zoo:
    def config(p: float, layers: int, width: int, heads: int, **sizes: Any) -> Any:
        return hf.WhisperConfig(
            d_model=width, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=heads, decoder_attention_heads=heads,
            encoder_ffn_dim=2 * width, decoder_ffn_dim=2 * width, dropout=p, attention_dropout=p, activation_dropout=p, use_cache=False,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, **sizes)  # fmt: skip

    def build(p: float) -> nn.Module:
        return hf.WhisperForConditionalGeneration(
            config(p, 2, 32, 4, vocab_size=96, num_mel_bins=8, max_source_positions=8, max_target_positions=16)
        )

    def batch(g: torch.Generator) -> Any:
        return {"input_features": torch.randn(ROWS, 8, 16, generator=g), "labels": text(g, 96, 6)["labels"]}

    def wide(layers: int) -> nn.Module:
        return hf.WhisperForConditionalGeneration(config(0.0, layers, HIDDEN, HEADS, vocab_size=51866, max_target_positions=SEQUENCE))

    def wide_batch() -> Any:
        return {"input_features": torch.zeros(BATCH, 80, 3000), "labels": torch.zeros(BATCH, 448, dtype=torch.long)}

    return Zoo("Whisper", build, batch, large=wide, large_batch=wide_batch, known=((2, 2, BATCH * 1500), (3, 3, BATCH * 448)),
               why="encoder: attention, MLP; decoder: attention, cross attention, MLP")  # fmt: skip


def _clip() -> Zoo:
    def config(p: float, layers: int, text_sizes: dict[str, Any], vision: dict[str, Any], **sizes: Any) -> Any:
        return hf.CLIPConfig(
            text_config=dict(num_hidden_layers=layers, attention_dropout=p, eos_token_id=2, bos_token_id=0, pad_token_id=1, **text_sizes),
            vision_config=dict(num_hidden_layers=layers, attention_dropout=p, **vision), **sizes)  # fmt: skip

    def build(p: float) -> nn.Module:
        sizes = {k: v for k, v in SMALL.items() if k not in ("max_position_embeddings", "num_hidden_layers")}
        words, image = dict(vocab_size=96, max_position_embeddings=16), dict(image_size=8, patch_size=4)
        return hf.CLIPModel(config(p, 2, {**sizes, **words}, {**sizes, **image}, projection_dim=16))

    def batch(g: torch.Generator) -> Any:
        ids = torch.randint(3, 96, (ROWS, 8), generator=g)
        ids[torch.arange(ROWS), torch.randint(3, 8, (ROWS,), generator=g)] = 2
        return {"input_ids": ids, "pixel_values": torch.randn(ROWS, 3, 8, 8, generator=g), "return_loss": True}

    def wide(layers: int) -> nn.Module:
        sizes = {k: v for k, v in LARGE.items() if k != "max_position_embeddings"}
        return hf.CLIPModel(config(0.0, layers, dict(**sizes), dict(**sizes), projection_dim=1024))

    def wide_batch() -> Any:
        ids = torch.zeros(BATCH, 77, dtype=torch.long)
        return {"input_ids": ids, "pixel_values": torch.zeros(BATCH, 3, 224, 224), "return_loss": True}

    return Zoo("CLIP", build, batch, large=wide, large_batch=wide_batch, divides=False,
               known=((2, 2, BATCH * 77), (2, 2, BATCH * 50)), why="text: attention, MLP; image: attention, MLP")  # fmt: skip


def _lora() -> Zoo:
    import peft

    def build(p: float) -> nn.Module:
        base = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=96, use_cache=False, attention_dropout=p, **SMALL, **KV))
        model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_dropout=p, target_modules="all-linear", init_lora_weights=False))
        return model

    def wide(layers: int) -> nn.Module:
        base = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=VOCAB, use_cache=False, num_hidden_layers=layers, **LARGE, **KV_LARGE))
        return peft.get_peft_model(base, peft.LoraConfig(r=16, target_modules="all-linear"))

    more = "between the two matrices of an adapter 16 numbers a token are gathered", 0.05
    return Zoo("Llama, LoRA", build, lambda g: text(g, 96), large=wide, large_batch=_large_text, more=more)


MODELS: tuple[Zoo, ...] = (
    _causal("Qwen3", "Qwen3", {**SMALL, **KV}, {**LARGE, **KV_LARGE}, ("attention_dropout",)),
    _causal("Gemma2", "Gemma2", {**SMALL, **KV, "sliding_window": 4, "query_pre_attn_scalar": 8},
            {**LARGE, **KV_LARGE, "sliding_window": 512}, ("attention_dropout",)),
    _causal("GPT-NeoX", "GPTNeoX", {**SMALL, "rotary_pct": 0.5}, LARGE, ("attention_dropout", "hidden_dropout"),
            known=((1, 1, BATCH * SEQUENCE),), why="attention and MLP side by side: one sum"),
    _causal("OPT", "OPT", dict(hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32,
                               word_embed_proj_dim=32),
            dict(hidden_size=HIDDEN, ffn_dim=4 * HIDDEN, num_attention_heads=HEADS, max_position_embeddings=SEQUENCE,
                 word_embed_proj_dim=HIDDEN), ("dropout", "attention_dropout")),
    _causal("Bloom", "Bloom", dict(hidden_size=32, n_layer=2, n_head=4), dict(hidden_size=HIDDEN, n_head=HEADS),
            ("hidden_dropout", "attention_dropout")),
    _causal("Phi", "Phi", SMALL, LARGE, ("resid_pdrop", "embd_pdrop", "attention_dropout"),
            known=((1, 1, BATCH * SEQUENCE),), why="attention and MLP side by side: one sum"),
    _causal("Falcon", "Falcon", dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, new_decoder_architecture=True,
                                     num_kv_heads=2),
            dict(hidden_size=HIDDEN, num_attention_heads=HEADS, new_decoder_architecture=True, num_kv_heads=8),
            ("attention_dropout", "hidden_dropout"), known=((1, 1, BATCH * SEQUENCE),), why="attention and MLP side by side: one sum"),
    _causal("Mixtral", "Mixtral", {**SMALL, **KV, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
            {**LARGE, **KV_LARGE, "num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": True}, ("attention_dropout",),
            divides=False,  # the share of every expert is taken over the whole batch
            more=("the router's probabilities are gathered, the gradients of its weights summed", 0.002)),
    _bert(),
    _vit(),
    _t5(),
    _whisper(),
    _clip(),
    _lora(),
)  # fmt: skip


def compiled(model: Zoo, layers: int, mesh: str, plan: Plan) -> Compiled:
    """The program of a large one: on meta, in bfloat16, compiled and not run."""
    assert model.large is not None and model.large_batch is not None
    with torch.device("meta"):
        module = model.large(layers).to(torch.bfloat16).train()
        batch = {k: v.to(torch.bfloat16) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in model.large_batch().items()}
    program = capture(module, batch)
    program = dataclasses.replace(program, outputs=tuple(o for o in program.outputs if o.kind != "output"))
    return compile_program(program, Mesh.parse(mesh), plan, DEFAULT, {i.name: 0 for i in program.inputs_of("batch")})


#: (axis, phase, whether it serves a bucket) to bytes that a rank sends in a step.
Traffic = Counter[tuple[str, str, bool]]


def traffic(c: Compiled) -> Traffic:
    """What rank 0 sends in a step."""
    found: Traffic = Counter()
    for row in collective_rows(c):
        found["+".join(row.axes), row.phase, row.module.startswith("bucket")] += row.times * row.bytes
    return found


def per_layer(model: Zoo, mesh: str, plan: Plan) -> tuple[Traffic, Traffic]:
    """What one layer more adds, and what is left when the layers are taken away."""
    two, three = (traffic(compiled(model, n, mesh, plan)) for n in (2, 3))
    return Counter({k: three[k] - two[k] for k in three}), Counter({k: 3 * two[k] - 2 * three[k] for k in three})


def known_bytes(model: Zoo, ways: int) -> tuple[int, int]:
    """The hand-known bytes that a rank sends for a layer over ``tp``, forward and backward."""
    forward, backward = (sum(k[i] * bytes_sent("all_reduce", k[2] * HIDDEN, 2, ways) for k in model.known) for i in (0, 1))
    return forward, backward


def moved(name: str) -> list[str]:
    """The row of a model in the table of bytes, in MiB."""
    torch.set_num_threads(1)
    model, shown = next(m for m in MODELS if m.name == name), []
    for plan in (Plan(), Plan(sequence=True)):
        layer, _ = per_layer(model, "tp=4", plan)
        shown += [f"{layer['tp', phase, False] / MIB:.1f}" for phase in ("forward", "backward")]
    layer, rest = per_layer(model, "dp=4", Plan())
    buckets = sum(layer["dp", phase, True] for phase in ("forward", "backward"))
    samples = [sum(t["dp", phase, False] for phase in ("forward", "backward")) / MIB for t in (layer, rest)]
    known = [f"{b / MIB:.1f}" for b in known_bytes(model, 4)]
    return [model.name, *known, *shown, f"{buckets / MIB:.1f}", f"{samples[0]:.2f}", f"{samples[1]:.2f}",
            "; ".join(filter(None, (model.why, model.more[0])))]  # fmt: skip


MIB = 2**20
MESHES = ("dp=2", "tp=2", "dp=2,tp=2", "tp=4")
VARIANTS = ("plain", "sequence", "microbatches=2", "dropout")
ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "out" / "zoo.json"
TEXT = """# Models of others

Written by `python -m tests.zoo > docs/models.md`: classes of transformers and peft, unmodified, with small random configurations. A cell
is one run of `autopar.verify`: all ranks simulated, three SGD steps, the largest relative difference of any loss, gradient, parameter
or buffer in float64, where {allowed} is allowed. Those of [models/](../models) are for `make matrix` ([matrix.md](matrix.md)).
{filled} {versions}.

{equal}

{refused}

## What they move

MiB that a rank sends for one layer more, at hidden {hidden}, {heads} heads, bfloat16, {batch} rows, compiled on meta: the difference
between three layers and two. *Known* is the pattern known by hand: an all-reduce of a hidden state for every sum in the last
column, forward and backward, which over 4 ranks sends 1.5 hidden states. `sequence` splits the same bytes into gathers and
reduce-scatters; where two norms, or a norm and a router, read the stream side by side, both results are gathered. In
BERT, whose norms come after the sums, the backward of the norm behind attention is computed whole, which gathers its input and its
gradient where the gather of one result would do. Over `dp` the
gradients are reduced and the parameters gathered, 0.75 of their bytes each, in buckets; *samples* is what else goes over `dp` for
a layer, *once* what goes over it in a step besides. {measured}

{bytes}
"""


def every() -> list[Case]:
    """All cells of the table."""
    return [Case(m, m.name, mesh, variant) for m in MODELS for variant in VARIANTS for mesh in MESHES if variant != "dropout" or m.dropout]


def run_case(name: str) -> dict[str, Any]:
    """The result of one case, in any process."""
    torch.set_num_threads(1)
    case = {str(c): c for c in every()}[name]
    try:
        report = case.verify()
    except AutoparError as error:
        return {"told": "refused", "why": f"{error.what}" + (f" ({error.why})" if error.why else "")}
    except Exception as error:  # noqa: BLE001 (told in the page)
        return {"told": "RAISES", "why": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    return {"told": f"{report.worst:.0e}" if report.ok else "DIFFERS", "why": "" if report.ok else report.table(1)}


def _of_sources(results: dict[str, dict[str, Any]]) -> str:
    """How many results are of which sources."""
    return ", ".join(f"{source} ({count})" for source, count in Counter(r["source"] for r in results.values()).most_common()) or "none"


def page(found: dict[str, dict[str, Any]], rows: dict[str, dict[str, Any]]) -> str:
    """docs/models.md."""
    table = [
        [m.name, v, *(found.get(f"{m.name} / {mesh} / {v}", {}).get("told", "") for mesh in MESHES)]
        for m in MODELS for v in VARIANTS if v != "dropout" or m.dropout
    ]  # fmt: skip
    why: dict[str, list[str]] = {}
    for name, result in found.items():
        if result["why"]:
            why.setdefault(result["why"], []).append(name)
    headers = ("model", "known forward", "known backward", "tp=4 forward", "backward", "sequence forward", "backward", "dp=4 buckets",
               "samples", "once", "sums of a layer")  # fmt: skip
    return TEXT.format(
        allowed=f"{TOLERANCE[torch.float64]:.0e}", versions=f"torch {torch.__version__}, transformers {hf.__version__}",
        filled=f"{len(found)} of {len(every())} cells are filled, of sources {_of_sources(found)};",
        hidden=HIDDEN, heads=HEADS, batch=BATCH,
        equal=tabulate(table, headers=("model", "variant", *MESHES), tablefmt="github", disable_numparse=True),
        refused="\n".join(f"- {', '.join(names)}: {text}" for text, names in why.items()) or "None is refused.",
        bytes=tabulate([rows[m.name]["row"] for m in MODELS if m.name in rows], headers=headers, tablefmt="github", disable_numparse=True),
        measured=f"{len(rows)} of {len(MODELS)} rows are measured, of sources {_of_sources(rows)}.",
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--only", default="", help="run only cases whose name has this text: model / mesh / variant, or model / bytes")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--page", action="store_true", help="run nothing; the page of what is kept")
    options = parser.parse_args(arguments)
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cases": {}, "bytes": {}}
    names = {"cases": [str(c) for c in every()], "bytes": [m.name for m in MODELS]}
    for kind, of in names.items():
        known[kind] = {name: known[kind][name] for name in of if name in known[kind]}
    if not options.page:
        _fill(known, {"cases": [n for n in names["cases"] if options.only in n],
                      "bytes": [n for n in names["bytes"] if options.only in f"{n} / bytes"]}, options.jobs)  # fmt: skip
    print(page(known["cases"], known["bytes"]), end="")
    return 0


def _fill(known: dict[str, dict[str, dict[str, Any]]], names: dict[str, list[str]], jobs: int) -> None:
    """Runs what isn't known of the present sources, and keeps every result as it comes."""
    source = source_hash()
    RESULTS.parent.mkdir(exist_ok=True)
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for kind, run in (("cases", run_case), ("bytes", run_bytes)):
            missing = [n for n in names[kind] if n not in known[kind]]
            todo = missing + [n for n in names[kind] if n in known[kind] and known[kind][n]["source"] != source]
            for name, result in zip(todo, pool.map(run, todo), strict=True):
                known[kind][name] = {**result, "source": source}
                RESULTS.write_text(json.dumps(known, indent=1))
                print(name, *result.values(), file=sys.stderr, flush=True)


def run_bytes(name: str) -> dict[str, Any]:
    """The row of a model in the table of bytes, in any process."""
    return {"row": moved(name)}


if __name__ == "__main__":
    sys.exit(main())
