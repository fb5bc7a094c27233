"""Models of others, unmodified, with small random configurations: whether they are captured and equal, and what they move.

``python -m tests.zoo [--only TEXT] [--jobs N] > docs/models.md``. Results of one hash of the sources are kept in out/zoo.json.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import nn

from autopar.capture import capture
from autopar.compiler import Compiled, compile_program
from autopar.layout.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.rules import DEFAULT
from tests.equality.cases import IGNORE, ROWS, Model, text

#: sizes at which the plan is the realistic one; they are compiled on meta and never run.
HIDDEN, HEADS, VOCAB, SEQUENCE, BATCH = 2048, 16, 32000, 1024, 8


@dataclass(frozen=True)
class Zoo(Model):
    """A model at two sizes. ``large(layers)`` → module, ``large_batch()`` → global batch: for looking at what is moved.

    Attributes:
        reduces: the hand-known number of all-reduces of a hidden state over ``tp`` that a layer needs, forward and backward.
        why: of what that number is made.
    """

    large: Callable[[int], nn.Module] | None = None
    large_batch: Callable[[], Any] | None = None
    reduces: tuple[int, int] = (2, 2)
    why: str = "after attention and after the MLP"
    width: int = HIDDEN
    tokens: int = BATCH * SEQUENCE


def _causal(
    name: str, kind: str, small: dict[str, Any], large: dict[str, Any], dropout: tuple[str, ...] = (), vocab: int = 96, **options: Any
) -> Zoo:
    """A causal language model of transformers by the name of its configuration."""
    config, model = getattr(hf, f"{kind}Config"), getattr(hf, f"{kind}ForCausalLM")

    def build(p: float) -> nn.Module:
        return model(config(vocab_size=vocab, use_cache=False, **small, **dict.fromkeys(dropout, p)))

    def wide(layers: int) -> nn.Module:
        return model(config(**{"vocab_size": VOCAB, "use_cache": False, **large, _layers(config): layers}, **dict.fromkeys(dropout, 0.0)))

    return Zoo(name, build, lambda g: text(g, vocab), None, bool(dropout), wide, _large_text, **options)


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

    return Zoo("ViT", build, batch, large=wide, large_batch=wide_batch, tokens=BATCH * 197)


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

    return Zoo("T5", build, batch, large=wide, large_batch=wide_batch, reduces=(5, 5),
               why="two of an encoder layer and three of a decoder layer (self and cross attention, MLP)")  # fmt: skip


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

    return Zoo("Whisper", build, batch, large=wide, large_batch=wide_batch, reduces=(5, 5),
               why="two of an encoder layer and three of a decoder layer (self and cross attention, MLP)")  # fmt: skip


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

    return Zoo("CLIP", build, batch, large=wide, large_batch=wide_batch, reduces=(4, 4), why="two of a text and two of an image layer")


def _lora() -> Zoo:
    import peft

    def build(p: float) -> nn.Module:
        base = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=96, use_cache=False, attention_dropout=p, **SMALL, **KV))
        model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_dropout=p, target_modules="all-linear", init_lora_weights=False))
        return model

    def wide(layers: int) -> nn.Module:
        base = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=VOCAB, use_cache=False, num_hidden_layers=layers, **LARGE, **KV_LARGE))
        return peft.get_peft_model(base, peft.LoraConfig(r=16, target_modules="all-linear"))

    return Zoo("Llama, LoRA", build, lambda g: text(g, 96), large=wide, large_batch=_large_text)


MODELS: tuple[Zoo, ...] = (
    _causal("Qwen3", "Qwen3", {**SMALL, **KV}, {**LARGE, **KV_LARGE}, ("attention_dropout",)),
    _causal("Gemma2", "Gemma2", {**SMALL, **KV, "sliding_window": 4, "query_pre_attn_scalar": 8},
            {**LARGE, **KV_LARGE, "sliding_window": 512}, ("attention_dropout",)),
    _causal("GPT-NeoX", "GPTNeoX", {**SMALL, "rotary_pct": 0.5}, LARGE, ("attention_dropout", "hidden_dropout"),
            reduces=(1, 1), why="attention and MLP run side by side: one sum after both"),
    _causal("OPT", "OPT", dict(hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32,
                               word_embed_proj_dim=32),
            dict(hidden_size=HIDDEN, ffn_dim=4 * HIDDEN, num_attention_heads=HEADS, max_position_embeddings=SEQUENCE,
                 word_embed_proj_dim=HIDDEN), ("dropout", "attention_dropout")),
    _causal("Bloom", "Bloom", dict(hidden_size=32, n_layer=2, n_head=4), dict(hidden_size=HIDDEN, n_head=HEADS),
            ("hidden_dropout", "attention_dropout")),
    _causal("Phi", "Phi", SMALL, LARGE, ("resid_pdrop", "embd_pdrop", "attention_dropout"),
            reduces=(1, 1), why="attention and MLP run side by side: one sum after both"),
    _causal("Falcon", "Falcon", dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, new_decoder_architecture=True,
                                     num_kv_heads=2),
            dict(hidden_size=HIDDEN, num_attention_heads=HEADS, new_decoder_architecture=True, num_kv_heads=8),
            ("attention_dropout", "hidden_dropout"), reduces=(1, 1), why="attention and MLP run side by side: one sum after both"),
    _causal("Mixtral", "Mixtral", {**SMALL, **KV, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
            {**LARGE, **KV_LARGE, "num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": True}, ("attention_dropout",)),
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


#: (axis, phase, kind of collective, bytes of its whole tensor, whether it serves a bucket) to times.
Traffic = Counter[tuple[str, str, str, int, bool]]


def traffic(c: Compiled) -> Traffic:
    """The collectives of a step. The whole tensor is what a gather gives and what a reduce-scatter takes."""
    found: Traffic = Counter()
    for node in c.final.nodes:
        if node.op.startswith("comm."):
            kind, ways = c.final.types[node.refs()[0]], c.final.mesh.count(node.args[1])
            size = kind.nbytes * (ways if node.op == "comm.all_gather" else 1)
            bucket = node.where.module.startswith("bucket")
            found["+".join(node.args[1]), node.phase, node.op[5:], size, bucket] += c.spec.microbatches if node.region == "body" else 1
    return found


def per_layer(model: Zoo, mesh: str, plan: Plan) -> tuple[Traffic, Traffic]:
    """What one layer more adds, and what is left when the layers are taken away."""
    two, three = (traffic(compiled(model, n, mesh, plan)) for n in (2, 3))
    layer = Counter({k: three[k] - two[k] for k in three | two if three[k] != two[k]})
    return layer, Counter({k: n for k in two if (n := two[k] - 2 * layer[k])})
