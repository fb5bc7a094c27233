"""Rows of fused attention: batch, heads and queries may be cut; where the op itself masks by position a piece is told where it starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from autopar.ir.program import Node, Offset, Ref, TensorType
from autopar.rules.rule import Local, Ring, Rule, Types


def _mask_term(shape: Sequence[int], full: Sequence[tuple[str, int]]) -> str:
    """The term of a tensor that broadcasts to dims of the given names and sizes."""
    own = full[len(full) - len(shape) :]
    return " ".join("1" if s == 1 and size != 1 else name for s, (name, size) in zip(shape, own))


def _heads(q: Sequence[int], k: Sequence[int]) -> tuple[str, str]:
    """The factor of the query heads and of the key heads: one, unless several query heads share a key head."""
    return ("h", "h") if q[1] == k[1] else (f"(g={k[1]} r)", "g")


def _parts(node: Node, types: Types, first: int) -> tuple[dict[str, str], Sequence[tuple[str, int]]]:
    q, k = (types[node.args[first + i].name].shape for i in (0, 1))
    query_heads, key_heads = _heads(q, k)
    terms = {"q": f"b {query_heads} q d", "k": f"b {key_heads} k d", "v": f"b {key_heads} k e", "o": f"b {query_heads} q e"}
    terms["lse"] = f"b {query_heads} q"
    return terms, (("b", q[0]), (query_heads, q[1]), ("q", q[2]), ("k", k[2]))


def _mask(node: Node, types: Types, dims: Sequence[tuple[str, int]], position: int, name: str) -> list[str]:
    mask = node.arg(position, name)
    return [_mask_term(types[mask.name].shape, dims)] if isinstance(mask, Ref) else []


def _kinds(cut: str) -> str:
    """Head dims are never cut."""
    return f"d: whole, e: whole, {cut}"


def _cpu_flash(node: Node, types: Types) -> str:
    t, dims = _parts(node, types, 0)
    terms = [t["q"], t["k"], t["v"], *_mask(node, types, dims, 99, "attn_mask")]
    return (
        f"{', '.join(terms)} -> {t['o']}, {t['lse']} ; {_kinds('q: offset, k: whole' if node.arg(4, 'is_causal', False) else 'k: whole')}"
    )


def _cpu_flash_local(node: Node, local: Local) -> Node:
    """Queries that begin elsewhere than at 0 see other keys than the op's own mask says."""
    start = local.start(local.inputs[0], 2)
    if not start.terms or not node.arg(4, "is_causal", False):
        return node
    return replace(node, op="autopar.causal_attention", args=(*node.args[:3], start), kwargs=_scale(node))


def _cpu_flash_backward(node: Node, types: Types) -> str:
    """With the output and logsumexp of all keys at hand, keys may be cut too where no mask goes by position.

    Query heads that share a key head (``r``) each add to its gradient.
    """
    t, dims = _parts(node, types, 1)
    terms = [t["o"], t["q"], t["k"], t["v"], t["o"], t["lse"], *_mask(node, types, dims, 99, "attn_mask")]
    cut = "r: sum, q: offset-sum, k: whole" if node.args[7] else "r: sum, q: sum, k: sum"
    return f"{', '.join(terms)} -> {t['q']}, {t['k']}, {t['v']} ; {_kinds(cut)}"


def _cpu_flash_backward_local(node: Node, local: Local) -> Node:
    start = local.start(local.inputs[1], 2)
    if not start.terms or not node.args[7]:
        return node
    return replace(node, op="autopar.causal_attention_backward", args=(*node.args[:6], start), kwargs=_scale(node))


def _scale(node: Node) -> tuple[tuple[str, float], ...]:
    scale = dict(node.kwargs).get("scale")
    return () if scale is None else (("scale", scale),)


def _ring(q: int, causal: int) -> Callable[[Node, Types], tuple[str, str] | None]:
    """Keys may go around where no mask does; with the op's own mask if all ranks have as many queries as keys. Positions of q, and of
    the flag, among the arguments."""

    def ring(node: Node, types: Types) -> tuple[str, str] | None:
        lengths = {types[node.args[q + i].name].shape[2] for i in (0, 1)}
        masked = isinstance(dict(node.kwargs).get("attn_mask"), Ref) or bool(node.arg(causal - 1, "dropout_p", 0.0))
        return None if masked or (node.arg(causal, "is_causal", False) and len(lengths) > 1) else ("q", "k")

    return ring


def _zigzag(q: TensorType, causal: bool) -> bool:
    """Whether halves of the queries change places, so that every rank's see as many keys."""
    return causal and q.shape[2] % 2 == 0


def _turns(node: Node, ring: Ring) -> tuple[str, ...]:
    """A turn for the keys of every rank; the next ones are sent for before a turn's are used."""
    q, k, v = (r.name for r in node.args[:3])
    kinds, causal = [ring.types[name] for name in (q, k, v)], bool(node.arg(4, "is_causal", False))
    shape, dtype, zigzag = kinds[0].shape[:3], kinds[2].dtype, _zigzag(kinds[0], causal)
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    out, lse = TensorType(dtype, (*shape, kinds[2].shape[3])), TensorType(wide, shape)
    q = ring.mirror(q, kinds[0]) if zigzag else q
    so_far: tuple[Ref | None, ...] = (None, None)
    names: tuple[str, ...] = ()
    for turn in range(ring.ranks):
        held, last = (k, v), turn == ring.ranks - 1
        if not last:
            k, v = (ring.shift(name, kind) for name, kind in zip(held, kinds[1:]))
        args = (Ref(q), *map(Ref, held), *so_far, Offset(((ring.axis, 1),)), turn, ring.ranks, causal, zigzag)
        results = (("out", out if last else replace(out, dtype=wide)), ("lse", lse))
        names = ring.add("autopar.ring_attention", args, results, _scale(node))
        so_far = tuple(map(Ref, names))
    return tuple(ring.mirror(name, kind) for name, kind in zip(names, (out, lse))) if zigzag else names


def _turns_backward(node: Node, ring: Ring) -> tuple[str, ...]:
    """The gradients of keys and values go around with them, and one turn more, home."""
    grad, q, k, v, out, lse = (r.name for r in node.args[:6])
    kinds, causal = [ring.types[name] for name in (q, k, v)], bool(node.args[7])
    zigzag = _zigzag(kinds[0], causal)
    if zigzag:
        grad, q, out, lse = (ring.mirror(name, ring.types[name]) for name in (grad, q, out, lse))
    so_far: list[Ref | None] = [None, None, None]
    names: list[str] = []
    for turn in range(ring.ranks):
        held = (k, v)
        if turn < ring.ranks - 1:
            k, v = (ring.shift(name, kind) for name, kind in zip(held, kinds[1:]))
        args = (*map(Ref, (grad, q, *held, out, lse)), *so_far, Offset(((ring.axis, 1),)), turn, ring.ranks, causal, zigzag)
        results = tuple(zip(("dq", "dk", "dv"), kinds))
        names = list(ring.add("autopar.ring_attention_backward", args, results, _scale(node)))
        names[1:] = [ring.shift(name, kind) for name, kind in zip(names[1:], kinds[1:])]
        so_far = [Ref(name) for name in names]
    return (ring.mirror(names[0], kinds[0]) if zigzag else names[0], *names[1:])


RULES = (
    Rule("aten._scaled_dot_product_flash_attention_for_cpu.default", _cpu_flash, local=_cpu_flash_local, contraction=True,
         apart=("d", "e"), ring=_ring(0, 4), turns=_turns,
         dense_last=(0, 1, 2), samples=(
        "f[4, 6, 4, 2], f[4, 6, 6, 2], f[4, 6, 6, 2]",
        "f[4, 6, 4, 2], f[4, 6, 4, 2], f[4, 6, 4, 2], 0.0, True",
        "f[4, 6, 6, 2], f[4, 2, 4, 2], f[4, 2, 4, 2], 0.0, True, scale=0.5",
        "f[4, 2, 4, 2], f[4, 2, 6, 2], f[4, 2, 6, 2], attn_mask=f[4, 1, 4, 6]",
        "f[4, 2, 4, 2], f[4, 2, 6, 2], f[4, 2, 6, 2], attn_mask=f[4, 6], scale=0.5",
    )),
    Rule("aten._scaled_dot_product_flash_attention_for_cpu_backward.default", _cpu_flash_backward, "0",
         local=_cpu_flash_backward_local, contraction=True,
         apart=("d", "d", "d", "e", "e"), ring=_ring(1, 7), turns=_turns_backward, dense_last=(1, 2, 3, 4), samples=(
             "f[4, 6, 4, 2], f[4, 6, 4, 2], f[4, 6, 6, 2], f[4, 6, 6, 2], f[4, 6, 4, 2], f[4, 6, 4], 0.0, False",
             "f[4, 6, 4, 2], f[4, 6, 4, 2], f[4, 6, 4, 2], f[4, 6, 4, 2], f[4, 6, 4, 2], f[4, 6, 4], 0.0, True",
             "f[4, 2, 4, 2], f[4, 2, 4, 2], f[4, 2, 6, 2], f[4, 2, 6, 2], f[4, 2, 4, 2], f[4, 2, 4], 0.0, False, attn_mask=f[4, 1, 4, 6]",
             "f[4, 6, 6, 2], f[4, 6, 6, 2], f[4, 2, 4, 2], f[4, 2, 4, 2], f[4, 6, 6, 2], f[4, 6, 6], 0.0, True, scale=0.5",
         )),
)  # fmt: skip
