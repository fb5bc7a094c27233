"""What is known of faults that nobody notices: changes that are none, and faults that the battery doesn't see. By fault, the reason."""

from __future__ import annotations

#: the program means the same with the change: not counted.
EQUIVALENT: dict[str, str] = {
    "codegen.emit Emitter.body: loop and looped → loop or looped": "what it gives is read only where there is a loop",
    "passes.canonicalize _mse: b.call('aten.sub.Tensor', n.args[0], n.args[1]) → b.call('aten.sub.Tensor', n.args[1], n.args[0])":
        "the difference is squared",
    "passes.canonicalize _addmm: 1 → 2 (number 3)": "alpha = 1 is multiplied instead of left out",
    "passes.canonicalize _nll_backward: reduction != 0 and b.type(target).shape → reduction != 0":
        "a number expanded to the shape () is itself",
    "passes.canonicalize prune: for o in n.outs if o → for o in n.outs": "the name of an unread output has no type to keep",
    "plan.axis solve: 'batch' → 'param'": "which inputs are decided together: another layout, as right",
    "plan.axis solve: i.kind != 'batch' → i.kind == 'batch'": "which inputs are decided together: another layout, as right",
    "layout.reshard _search: price(step.kind, step.axis, step_bytes(step.kind, numel, ite … .axis])) → "
    "price(step.axis, step.kind, step_bytes(step.kind, numel, ite … .axis]))": "another price, another way, as right",
    "layout.reshard _steps: sorted(wanted) → list(wanted)": "the order in which ways of one price are tried",
    "runtime.executor own: flat[index * part:(index + 1) * part].clone() → flat[index * part:(index + 1) * part]":
        "the tensor of which it is a view is held by nobody else",
    "passes.insert_collectives _Inserter.output: reversed(self.program.nodes) → list(self.program.nodes)": "a value has one producer",
    "rules.atoms _join_simple: factors and found is not None → factors or found is not None":
        "a dim has a factor where it has a class of dims",
    "rules.atoms _join_simple: factors and found is not None → factors": "a dim has a factor where it has a class of dims",
    "rules.atoms _join_merged: len(factors) == 1 and found is not None → len(factors) == 1":
        "a dim has a factor where it has a class of dims",
    "rules.atoms _split: True → False": "which wishes for finer atoms are granted: another layout, as right",
    "rules.rule view_row: refine([s for _, s in group_l], [s for _, s in group_r]) → "
    "refine([s for _, s in group_r], [s for _, s in group_l])":
        "the common refinement of two sequences is symmetric",
    "rules.rule refine: x > y and x % y == 0 → x > y": "what isn't a multiple leaves products that never come out equal: no refinement",
    "runtime.ops unpick: 1 → 2": "dims are counted from the left by then",
    "codegen.render offset: 1 → 0": "a coordinate is written times 1",
    "passes.microbatch split_microbatches: for i in program.inputs_of('batch'): dim = batch_dims.get(i. …  batch') → "
    "for i in list(program.inputs_of('batch'))[:-1]: dim = batch_ …  batch')": "a guard: its loop does nothing but raise",
    # of --seed 1
    "rules.rule refine: y > x → y >= x": "where they are equal the branch before was taken",
    "passes.insert_collectives _Inserter.want: have.partial_axes() and name in self.producer → name in self.producer":
        "the source line beside a collective",
    "codegen.emit Emitter.driver: len(returned) > 1 → len(returned) >= 1": "brackets around what is returned",
    "codegen.emit Emitter.constant_nodes: for o in node.outs if o → for o in node.outs": "nobody reads an output without a name",
    "rules.atoms analyse: if name in matrices: used.add(matrices[name]) for d in dims[ … eature') → dropped":
        "a mark that the search for a layout goes by: another layout, as right",
    "codegen.render literal: isinstance(value, float) and (not math.isfinite(value)) → "
    "isinstance(value, float) or not math.isfinite(value)":
        "a finite number is written as a text that reads back to it",
    "passes.canonicalize canonicalize: any((KEY in n.refs() for n in builder.nodes)) and (not any(( … nputs))) → "
    "any((KEY in n.refs() for n in builder.nodes)) or not any((i. … inputs))": "an input more that nobody reads",
}  # fmt: skip

#: a real fault that the battery doesn't notice, and why: counted as a survivor.
SURVIVORS: dict[str, str] = {
    "layout.mesh Mesh.index: 0 → 1 (number 2)": "an axis that the mesh lacks: a compiled program names none",
    "runtime.ops microbatch: split.reshape(*shape[:dim], outer * rest, *shape[dim + 1:]). … iguous() → "
    "split.reshape(*shape[:dim], outer * rest, *shape[dim + 1:])": "the same values; only a kernel that reads raw memory sees the strides",
    "runtime.comm Comm._reduce: op == 'sum' and out.dtype in _SHORT → out.dtype in _SHORT":
        "only numbers of 16 bits; the battery is in float64: tests/runtime/test_comm.py",
    "runtime.comm Comm._reduce: 'sum' → 'max'": "only numbers of 16 bits; the battery is in float64: tests/runtime/test_comm.py",
    "runtime.comm Comm._reduce: for part in parts[1:]: total.add_(part) → for part in list(parts[1:])[1:]: total.add_(part)":
        "only numbers of 16 bits; the battery is in float64: tests/runtime/test_comm.py",
    "runtime.comm Comm._run: value if out is None else out → out if out is None else value":
        "a group of one rank: an emitted program has none",
    "runtime.comm Comm._run: if group.size == 1: value = x.clone(memory_format=torch.cont … lse out) → dropped":
        "a group of one rank answers through the transport, with a record more: tests/runtime/test_sim.py",
    "runtime.sim SimComm._begin: call.out is not None and call.out.is_floating_point() and (_ … rage(x)) → "
    "call.out is not None and _storage(call.out) != _storage(x)": "emitted programs give no `out`",
    "rules.atoms _join_merged: all((p.root() is not found.root() for p in parts)) → any((p.root() is not found.root() for p in parts))":
        "a dim that would be refined into itself: no view of the battery asks for it",
    "runtime.sim SimComm._begin: call.out.fill_(float('nan')) → dropped":
        "a trap for programs that read too early; emitted ones give no `out`: tests/runtime/test_sim.py",
    "passes.canonicalize _log_softmax: if n.args[2]: x = b.call('aten._to_copy.default', x, dtype=t … float32) → dropped":
        "a softmax that also converts from 16 bits is made on CUDA only",
    "passes.canonicalize _log_softmax_backward: result if b.type(result).dtype == dtype else b.call('aten._t … e=dtype) → "
    "b.call('aten._to_copy.default', result, dtype=dtype) if b.ty … e result":
        "a softmax that also converts from 16 bits is made on CUDA only",
    "passes.canonicalize canonicalize: any((i.kind == 'key' for i in inputs)) → all((i.kind == 'key' for i in inputs))":
        "a program that is canonical already, as in evaluation; `verify` trains",
    "passes.microbatch _Splitter.can_hoist: for r in self.program.nodes[n].refs() → for r in list(self.program.nodes[n].refs())[1:]":
        "a model that should be refused is computed twice, rightly: tests of refusals",
    "rules.strategies _is_major: all((dim[0] == factor for dim in terms[term] if factor in dim)) → "
    "any((dim[0] == factor for dim in terms[term] if factor in dim))": "no row of the table has an offset factor in a merged dim",
}  # fmt: skip
