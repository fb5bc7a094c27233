"""The captured program gives what plain eager gives: loss, gradients, buffers, outputs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from autopar.capture import capture, rebuild_output
from autopar.capture.interpret import run
from autopar.capture.refuse import check_random
from autopar.compare import plain_ops
from autopar.errors import InputError, UnsupportedError
from autopar.ir.program import Program
from autopar.ir.text import show_program
from tests.capture import toys
from tests.capture.toys import check, normal, seeded, values_of


def wheres(program: Program) -> set[str]:
    return {node.where.module for node in program.nodes}


def test_gpt() -> None:
    program = check(seeded(toys.TinyGPT()), toys.text_batch())
    assert {"tokens", "blocks.0.qkv", "blocks.1", "blocks.1.mlp.3", "norm", "head", ""} <= wheres(program)
    forward = {n.where.module for n in program.nodes if n.phase == "forward"}
    assert {n.where.module for n in program.nodes if n.phase == "backward"} <= forward
    assert [i.path for i in program.inputs_of("batch")] == ["0", "1"]
    assert [i.kind for i in program.inputs][-1] == "tangent"
    line = next(n for n in program.nodes if n.op == "aten.addmm.default")
    assert line.where.file.endswith("toys.py") and "self.qkv(self.norm(x))" in line.where.code and line.name == "blocks_0_qkv_addmm"


def test_tied_weights_are_one_input_with_one_gradient() -> None:
    program = check(seeded(toys.TinyGPT(tied=True)), toys.text_batch())
    (tied,) = [i for i in program.inputs if i.aliases]
    assert (tied.path, tied.aliases) == ("tokens.weight", ("head.weight",))


def test_block_reused() -> None:
    check(seeded(toys.TinyGPT(layers=1, repeat=3)), toys.text_batch())


def test_custom_backward_is_kept() -> None:
    check(seeded(toys.Spiking()), normal(5, 4))


def test_buffers() -> None:
    program = check(seeded(toys.Normed()), normal(2, 2, 5, 5))
    assert {o.path for o in program.outputs_of("buffer")} == {
        "counter", "running", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked",
    }  # fmt: skip


def test_nested_batch_and_named_tuple_output() -> None:
    model, x = seeded(toys.Nested()), normal(3, 4)
    batch = {"x": x, "aux": {"mask": normal(3, 1, seed=1), "more": [normal(4, seed=2)]}, "scale": 2.5, "flag": True}
    program = check(model, batch)
    assert [i.path for i in program.inputs_of("batch")] == ["x", "aux.mask", "aux.more.0"]
    assert [i.name for i in program.inputs_of("batch")] == ["x", "aux_mask", "aux_more_0"]
    assert [o.path for o in program.outputs_of("output")] == ["loss", "hidden.0", "hidden.1", "hidden.2"]
    results = run(program, values_of(program, model, batch))
    rebuilt = rebuild_output(program.output_tree, [results[f"output {o.path}"] for o in program.outputs_of("output")])
    want = model(**batch)
    assert isinstance(rebuilt, toys.Pair) and rebuilt.scale == 2.5
    torch.testing.assert_close(rebuilt, want, rtol=1e-12, atol=1e-14)


def test_tuple_batch_with_numbers() -> None:
    check(seeded(toys.Nested()), (normal(3, 4), {"mask": normal(3, 1), "more": (normal(4),)}, 0.5))


def test_frozen_unused_and_constants() -> None:
    program = check(seeded(toys.Partial()), normal(3, 4))
    assert program.unreached == ("unused",)
    assert {i.path for i in program.inputs_of("param")} >= {"frozen.weight", "unused"}
    assert [i.trainable for i in program.inputs_of("param") if i.path.startswith("frozen")] == [False, False]
    assert set(program.consts) == {"scale", "literal.0", "literal.1"}


def test_in_place_writes() -> None:
    program = check(seeded(toys.InPlace()), normal(3, 4))
    assert not any("copy.default" in n.op and "_to_" not in n.op or "new_empty" in n.op for n in program.nodes)


def test_loss_function() -> None:
    def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(output, batch[1])

    class Second(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x)

    program = check(seeded(Second(4, 2)), (normal(3, 4), normal(3, 2, seed=1)), loss)
    assert [o.path for o in program.outputs_of("output")] == [""]


def test_loss_in_a_dict_and_outputs_that_carry_no_gradient() -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> dict[str, Any]:
            y = super().forward(x)
            return {"loss": y.square().mean().reshape(1), "y": y, "same": y, "in": x, "note": "text"}

    program = check(seeded(Model(4, 2)), normal(3, 4))
    outputs = {o.path: o.value for o in program.outputs_of("output")}
    assert outputs["y"] == outputs["same"] and outputs["in"] == next(program.inputs_of("batch")).name


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_multilabel_margin_loss(reduction: str) -> None:
    """Torch's own tracing of it counts labels behind the first -1."""
    labels = torch.tensor([[3, 0, -1, 1], [1, -1, 2, 3], [-1, 0, 1, 2], [0, 1, 2, 3], [2, 2, -1, 0]])
    check(seeded(nn.Linear(4, 4)), normal(5, 4), lambda y, _: F.multilabel_margin_loss(y, labels, reduction=reduction).pow(2).sum())
    check(seeded(nn.Linear(4, 4)), normal(4), lambda y, _: F.multilabel_margin_loss(y, labels[0], reduction=reduction).pow(2).sum())


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 2, -1])
def test_embedding_bags(mode: str, padding: int | None) -> None:
    ids = torch.tensor([[1, 2, 2, 5], [0, 5, 1, 1], [2, 2, 2, 2], [3, 5, 5, 2]])
    check(seeded(nn.EmbeddingBag(6, 3, mode=mode, padding_idx=padding)), ids, lambda y, _: y.pow(3).sum())
    if mode != "max":
        offsets = torch.tensor([0, 3, 3, 9])
        check(seeded(nn.EmbeddingBag(6, 3, mode=mode, padding_idx=padding)), (ids.flatten(), offsets), lambda y, _: y.pow(3).sum())
    if mode == "sum":
        check(seeded(nn.EmbeddingBag(6, 3, mode=mode)), {"input": ids, "per_sample_weights": normal(4, 4)}, lambda y, _: y.pow(3).sum())


def spd(y: Tensor) -> Tensor:
    return y @ y.mT + torch.eye(y.shape[-1], dtype=y.dtype)


@pytest.mark.parametrize(
    "use",
    [
        lambda y: torch.linalg.inv(spd(y)),
        lambda y: torch.linalg.cholesky(spd(y)),
        lambda y: torch.linalg.solve(spd(y), y),
        lambda y: torch.linalg.solve(spd(y), y[..., 0]),
        lambda y: torch.linalg.matrix_power(spd(y), -2),
        lambda y: torch.linalg.lu_solve(*torch.linalg.lu_factor(spd(y)), y),
        lambda y: torch.cholesky_solve(y, torch.linalg.cholesky(spd(y))),
    ],
)
def test_solvers_keep_their_checks(use: Any) -> None:
    model = seeded(nn.Linear(4, 4))
    program = capture(model, normal(3, 4, 4), loss=lambda y, _: use(y).square().sum())
    assert any(n.op == "autopar.checked" for n in program.nodes)
    results = run(program, values_of(program, model, normal(3, 4, 4)), plain_ops())
    want = use(model(normal(3, 4, 4))).square().sum()
    want.backward()
    toys.assert_close(results["loss"], want.detach(), "loss")
    toys.assert_close(results["grad weight"], model.weight.grad, "weight")


def test_a_solver_that_fails_raises() -> None:
    model = seeded(nn.Linear(4, 4))
    program = capture(model, normal(3, 4, 4), loss=lambda y, _: torch.linalg.cholesky(-spd(y)).square().sum())
    with pytest.raises(InputError, match="linalg.cholesky failed on 3 of 3 matrices"):
        run(program, values_of(program, model, normal(3, 4, 4)), plain_ops())


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "old_weight_norm", "shared"])
def test_parametrized(kind: str) -> None:
    lin = nn.Linear(4, 4).double()
    if kind == "weight_norm":
        lin = parametrizations.weight_norm(lin)
    elif kind == "spectral_norm":
        lin = parametrizations.spectral_norm(lin)
    elif kind == "old_weight_norm":
        lin = torch.nn.utils.weight_norm(lin)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = lin
            self.b = lin

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).tanh()).square().mean()

    if kind == "old_weight_norm":  # deepcopy doesn't take its non-leaf attribute
        model, x = Model(), normal(3, 4)
        program = capture(model, x)
        results = run(program, values_of(program, model, x))
        model(x).backward()
        for name, parameter in model.named_parameters():
            toys.assert_close(results[f"grad {name}"], parameter.grad, name)
        return
    program = check(Model(), normal(3, 4))
    if kind == "weight_norm":
        assert "a.parametrizations.weight.original0" in {i.path for i in program.inputs}


def test_hooks_of_modules_run() -> None:
    model = seeded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    model[0].register_forward_hook(lambda m, a, o: o * 2)
    model[1].register_forward_pre_hook(lambda m, a: (a[0].tanh(),))
    check(model, normal(3, 4), lambda o, b: o.square().mean())


def test_hooks_that_a_forward_adds_are_added_once() -> None:
    """Libraries that record outputs add their hooks when the model is first called; every run of the capture is a first one."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            seen: list[Tensor] = []
            if not hasattr(self, "hooked"):
                self.hooked = True
                self.lin.register_forward_hook(lambda m, a, o: o * 2)
            handle = self.lin.register_forward_hook(lambda m, a, o: seen.append(o))
            loss = self.lin(x).square().mean()
            handle.remove()
            return loss, *seen

    model = seeded(Model())
    program = capture(model, normal(3, 4), loss=lambda output, _: output[0])
    assert [n.op for n in program.nodes if n.phase == "forward"].count("aten.mul.Tensor") == 1
    assert not hasattr(model, "hooked") and not vars(model.lin)["_forward_hooks"]


def test_hook_on_an_activation_runs() -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            y.register_hook(lambda g: g * 3)
            return y.square().mean()

    check(seeded(Model(4, 2)), normal(3, 4))


def test_checkpointed_region() -> None:
    class Model(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.a, self.b, self.reentrant = nn.Linear(4, 4), nn.Linear(4, 4), reentrant

        def forward(self, x: Tensor) -> Tensor:
            y = torch.utils.checkpoint.checkpoint(lambda t: self.b(t).tanh(), self.a(x), use_reentrant=self.reentrant)
            return y.square().mean()

    check(seeded(Model(False)), normal(3, 4))


def test_autocast_region() -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(x.device.type, dtype=torch.bfloat16):
                y = super().forward(x)
            return y.float().square().mean()

    model, x = Model(4, 2), torch.randn(3, 4)
    program = capture(model, x)
    results = run(program, values_of(program, model, x))
    model(x).backward()
    assert torch.equal(results["grad weight"], model.weight.grad)
    assert torch.bfloat16 in {t.dtype for t in program.types.values()}


def test_eval_mode_and_forward_only() -> None:
    model = seeded(toys.Normed())
    model.norm.running_var.mul_(3)
    x = normal(2, 2, 5, 5)
    program = capture(model, x, train=False, grads=False)
    results = run(program, values_of(program, model, x))
    plain = copy.deepcopy(model).eval()
    toys.assert_close(results["loss"], plain(x).detach(), "loss")
    assert {o.path for o in program.outputs_of("buffer")} == {"counter", "running"}
    assert not any(n.phase == "backward" for n in program.nodes) and not list(program.inputs_of("tangent"))
    toys.well_formed(program)


def test_forward_only_needs_no_loss() -> None:
    model, x = seeded(nn.Linear(4, 2)), normal(3, 4)
    program = capture(model, x, train=False, grads=False)
    assert [o.kind for o in program.outputs] == ["output"]
    results = run(program, values_of(program, model, x))
    toys.assert_close(results["output"], model(x).detach(), "output")


def test_modes_of_submodules() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2), nn.Dropout(0.5))
    model[2].eval()
    drops = [n.where.module for n in capture(model, torch.ones(3, 4), loss=lambda o, b: o.mean()).nodes if "dropout.default" in n.op]
    assert drops == ["0"]
    assert [m.training for m in model] == [True, True, False]
    assert not any("dropout" in n.op for n in capture(model, torch.ones(3, 4), loss=lambda o, b: o.mean(), train=False).nodes)
    assert [m.training for m in model] == [True, True, False]


def test_random_ops_stay_where_they_ran_even_if_unread() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            self.drop(x)
            return (self.drop(self.lin(x)) * torch.rand(4)).mean()

    model = Model()
    before = torch.random.get_rng_state()
    program = capture(model, torch.ones(2, 4))
    assert torch.equal(before, torch.random.get_rng_state())
    found = [(n.op, n.where.module) for n in program.nodes if n.op in ("aten.native_dropout.default", "aten.rand.default")]
    assert found == [("aten.native_dropout.default", "drop")] * 2 + [("aten.rand.default", "")]


def test_meta_and_real_weights_give_one_text() -> None:
    model = toys.TinyGPT(tied=True)
    with torch.device("meta"):
        unreal = toys.TinyGPT(tied=True)
    assert show_program(capture(model, toys.text_batch())) == show_program(capture(unreal, toys.text_batch()))
    meta_batch = tuple(t.to("meta") for t in toys.text_batch())
    assert show_program(capture(unreal, meta_batch)) == show_program(capture(model, toys.text_batch()))


def test_bfloat16() -> None:
    program = capture(toys.TinyGPT(dropout=0.1).to(torch.bfloat16), toys.text_batch())
    assert all(program.types[o.value].dtype == torch.bfloat16 for o in program.outputs_of("grad"))


def snapshot(model: nn.Module) -> Any:
    return [
        (path, {k: (id(v), dict(v) if isinstance(v, dict) else None) for k, v in vars(m).items()}, list(vars(m)))
        for path, m in model.named_modules()
    ]


@pytest.mark.parametrize("fail", [False, True])
def test_the_model_is_left_as_it_was(fail: bool) -> None:
    class Model(toys.Partial):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Tensor] = []
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(x)
            self.last = x
            if fail:
                raise ValueError("on purpose")
            return super().forward(x)

    model = seeded(Model())
    model.eval()
    values = [t.detach().clone() for t in model.state_dict().values()]
    before = snapshot(model)
    try:
        capture(model, normal(3, 4))
    except Exception as error:
        assert fail and "on purpose" in str(error)
    assert snapshot(model) == before and model.seen == [] and model.last is None and not model.training
    assert all(torch.equal(a, b) for a, b in zip(values, model.state_dict().values(), strict=True))


def test_devices_in_the_forward_are_left_out() -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            device = torch.device("cuda", 0)
            y = super().forward(x.to(device, torch.float64)) * torch.arange(2, device=device).to("cuda")
            with torch.device("cuda"):
                y = y + torch.ones(2)
            return y.cpu().to(device=device, dtype=torch.float32).mean()

    program = capture(Model(4, 2).double(), torch.ones(3, 4))
    toys.well_formed(program)


def huggingface(name: str, dropout: float = 0.0) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="Hugging Face models need the test extra")
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=4,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, **ends,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, **ends
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("mask", [False, True])
def test_hugging_face(name: str, mask: bool) -> None:
    ids = toys.integers(50, 2, 8)
    batch = {"input_ids": ids, "labels": ids}
    if mask:
        batch["attention_mask"] = (toys.integers(4, 2, 8) > 0).long().index_fill(1, torch.tensor(0), 1)
    model = huggingface(name).double()
    program = check(model, batch)
    assert {"loss", "logits"} <= {o.path for o in program.outputs_of("output")}
    stem = {"gpt2": "transformer.h.1", "llama": "model.layers.1"}[name]
    assert any(n.where.module.startswith(stem) and n.phase == "backward" for n in program.nodes)
    # Only what the top module itself does (the loss) has no deeper path.
    assert sum(not n.where.module for n in program.nodes) < 20
    output = rebuild_output(program.output_tree, [o.value for o in program.outputs_of("output")])
    assert type(output).__name__ == {"gpt2": "CausalLMOutputWithCrossAttentions", "llama": "CausalLMOutputWithPast"}[name]


def test_hugging_face_with_dropout() -> None:
    ids = toys.integers(50, 2, 8)
    program = capture(huggingface("gpt2", 0.1), {"input_ids": ids, "labels": ids})
    toys.well_formed(program)
    drops = [n.where.module for n in program.nodes if n.op == "aten.native_dropout.default"]
    assert drops == ["transformer.drop"] + [f"transformer.h.{i}.{m}" for i in (0, 1) for m in ("attn", "attn.resid_dropout", "mlp.dropout")]


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_layers_keep_their_dropout(layer: type[nn.RNNBase], bidirectional: bool) -> None:
    """Torch's own tracing of several layers forgets it."""
    model = layer(4, 8, num_layers=3, dropout=0.4, bidirectional=bidirectional, batch_first=True)
    program = capture(model, torch.ones(2, 5, 4), loss=lambda o, b: o[0].mean())
    masks = [n for n in program.nodes if n.op == "aten.native_dropout.default"]
    wide = 8 * (2 if bidirectional else 1)
    assert [program.types[n.refs()[0]].shape for n in masks] == [(5, 2, wide)] * 2
    assert not any("dropout" in n.op for n in capture(model, torch.ones(2, 5, 4), loss=lambda o, b: o[0].mean(), train=False).nodes)


@pytest.mark.parametrize("layer", ["LSTM", "GRU", "RNN", "LSTM proj"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_recurrent_layers_with_dropout_equal_torchs(layer: str, batch_first: bool) -> None:
    """With masks of ones: in eval mode torch runs its own layers, in train mode these are split."""
    made = getattr(nn, layer.split()[0])
    options: dict[str, Any] = {"proj_size": 3} if "proj" in layer else {}
    model = made(4, 8, num_layers=2, dropout=1e-300, bidirectional=True, batch_first=batch_first, **options).double()

    def loss(output: Any, batch: Any) -> Tensor:
        y, last = output
        return y.pow(3).sum() + sum((k + 2) * t.pow(3).sum() for k, t in enumerate(last if isinstance(last, tuple) else (last,)))

    x = normal(3, 5, 4)
    program = capture(model, x, loss=loss)
    ones = {"aten.native_dropout.default": lambda x, p, train: (x, torch.ones_like(x, dtype=torch.bool))}
    results = run(program, values_of(program, model, x), ones)
    want = loss(model.eval()(x), x)
    want.backward()
    toys.assert_close(results["loss"], want.detach(), "loss")
    for name, parameter in model.named_parameters():
        toys.assert_close(results[f"grad {name}"], parameter.grad, name)


def test_a_random_op_that_tracing_loses_is_refused() -> None:
    graph = torch.fx.symbolic_trace(nn.Linear(2, 2))
    check_random(graph, 0)
    with pytest.raises(UnsupportedError, match="runs 2 random ops in its forward, of which 0 were traced"):
        check_random(graph, 2)
