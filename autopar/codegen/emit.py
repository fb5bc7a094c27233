"""A local program as one readable Python module: compute segments, and a driver that calls them and the collectives between them.

A segment is a pure function of tensors: a run of nodes of one layer and phase between two collectives. Segments with the same text are one
(layers that repeat share theirs). The driver owns order and lifetimes: it starts collectives, waits where the result is first needed, and
deletes what nobody reads any more.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.codegen.memory import dying, overwritten
from autopar.codegen.render import Site, assign, bracket, call, define, offset
from autopar.cost.live import may_view
from autopar.ir.local import LocalProgram
from autopar.ir.program import Node, Offset, Region, dtype_name, fresh_name, layer_of

#: random ops: position of the number of the call, which differs from layer to layer.
_SITES = {"autopar.keep": 1, "autopar.uniform": 1, "autopar.normal": 1, "autopar.randint": 1, "autopar.bernoulli": 1}

#: ops that can write their result where it belongs: they take ``out``.
_MADE_IN_PLACE = ("aten.mm.default", "autopar.embedding_backward")


#: how many reductions of gradients whose memory the step takes may be under way.
REDUCING = 2

#: what a microbatch that runs beside others (passes/interleave.py) adds to its values' names; they share their segments.
_LANE = re.compile(r"__[\d_]+$")


@dataclass
class _Statement:
    """A statement of the driver: its lines, what it defines and what it reads; and what ``codegen/live.py`` reads of it.

    Attributes:
        starts: the value whose collective it starts.
        nodes: what it runs; none of a wait.
        dies: of a segment, what it deletes after each of its nodes.
        gone: what the driver deletes after it.
    """

    lines: list[str]
    defines: list[str]
    reads: list[str]
    region: Region = "body"
    starts: str = ""
    nodes: Sequence[Node] = ()
    dies: Sequence[Sequence[str]] = ()
    gone: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Script:
    """A driver as data: its statements in order, what it deletes after its loop, and which results lie in an operand or in a bucket."""

    statements: tuple[_Statement, ...]
    after: tuple[str, ...] = ()
    over: Mapping[str, int] = field(default_factory=dict)
    born: Collection[str] = ()


@dataclass
class Module:
    """An emitted module.

    ``source`` defines ``constants(comm, consts)``, the segments, and
    ``step(comm, params, buckets, buffers, batch, grads, constants, key)``, which returns loss, gradients by bucket, new buffers and
    outputs. The tuples hold the paths of its arguments and results in order.
    Buckets in ``gathers`` are handles of gathers that the caller has begun, in the order in which the step waits for them (under ZeRO 3
    they come behind the parts, and what they give is the step's to give back); a gradient
    whose last op is a collective is the handle of it. ``grads`` are flat tensors, in which gradients are made.
    """

    source: str
    params: tuple[str, ...]
    buckets: tuple[str, ...]
    buffers: tuple[str, ...]
    batch: tuple[str, ...]
    consts: tuple[str, ...]
    new_buffers: tuple[str, ...]
    outputs: tuple[str, ...]
    segments: int = 0
    calls: int = 0
    axes: tuple[tuple[str, ...], ...] = ()
    gathers: tuple[str, ...] = ()
    script: Script = field(default=Script(()), compare=False, repr=False)


def emit(program: LocalProgram, title: str = "", *, tensor_sites: bool = False) -> Module:
    """The module of a local program.

    ``tensor_sites`` passes the numbers of random calls as tensors, so that a compiled segment isn't compiled again for each layer.
    """
    return Emitter(program, title, tensor_sites).run()


@dataclass
class Emitter:
    """Makes the text of one program; that of a stage's tasks (``codegen/stages.py``) is made by a subclass."""

    program: LocalProgram
    title: str
    tensor_sites: bool = False
    segments: dict[str, str] = field(default_factory=dict)  # text without its name -> name
    texts: list[list[str]] = field(default_factory=list)
    statements: list[_Statement] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    calls: int = 0
    uses: Counter[str] = field(default_factory=Counter)
    gathers: dict[str, str] = field(default_factory=dict)  # bucket -> the gathered value
    buckets: set[str] = field(default_factory=set)
    flats: list[str] = field(default_factory=list)  # given by the caller
    taken: dict[str, int] = field(default_factory=dict)  # flat tensor that a step takes memory for -> its elements
    parts: dict[str, str] = field(default_factory=dict)  # gradients of a bucket as the caller gets them -> their memory, given by it
    open: set[str] = field(default_factory=set)  # those of them that there are, in the statements so far
    reducing: list[str] = field(default_factory=list)  # their reductions under way
    gathered: dict[str, str] = field(default_factory=dict)  # what lies in memory taken for a gather -> the gathered value
    over: dict[str, int] = field(default_factory=dict)  # result -> position of the operand that it is written over
    born: dict[str, str] = field(default_factory=dict)  # gradient that is made in its bucket -> its place there, as an expression
    homes: dict[str, str] = field(default_factory=dict)  # and the flat tensor of its bucket
    after: list[str] = field(default_factory=list)  # what is deleted after the loop

    def run(self) -> Module:
        p = self.program
        self.buckets = {i.name for i in p.inputs_of("bucket")}
        packs = {n.where.module: n.name for n in p.nodes if n.op == "autopar.pack"}
        self.find_flats(packs)
        fixed = self.constant_nodes()
        main = [n for i, n in enumerate(p.nodes) if i not in fixed]
        order: dict[Region, list[Node]] = {"pre": [], "body": [], "post": []}
        for node in main:
            order["body" if node.op == "autopar.accumulate" else node.region].append(node)
        finals = [o.value for o in p.outputs]
        self.uses = Counter(r for n in main for r in n.refs())
        if not self.tensor_sites:
            self.over = overwritten(p, [n for nodes in order.values() for n in nodes])
        self.find_born(main)
        for region, nodes in order.items():
            self.region(region, nodes, set(finals))
        used = {r for s in self.statements for r in s.reads} | set(finals)
        made = [o for i in sorted(fixed) for o in p.nodes[i].outs if o]
        held = [i.name for i in p.inputs if i.kind in ("const", "tangent")]
        shared = [v for v in [*made, *held] if v in used]
        lines = self.header() + self.constants([p.nodes[i] for i in sorted(fixed)], shared) + self.driver(shared)
        kinds = {k: tuple(i.path for i in p.inputs_of(k)) for k in ("param", "bucket", "buffer", "batch", "const")}
        axes = tuple(dict.fromkeys(n.args[1] for n in p.nodes if n.op.startswith("comm.")))
        return Module(
            "\n".join(lines) + "\n", kinds["param"], kinds["bucket"], kinds["buffer"], kinds["batch"], kinds["const"],
            tuple(o.path for o in p.outputs_of("buffer")), tuple(o.path for o in p.outputs_of("output")),
            len(self.texts), self.calls, axes, tuple(self.gathers), self.script(),
        )  # fmt: skip

    def find_flats(self, packs: Mapping[str, str]) -> None:
        """Where the gradients of buckets are made: in memory that the caller gives, or that a step takes for each until it is reduced.

        The caller gives the memory of what is left then.
        """
        made, final = self.program.producers(), {o.path: o.value for o in self.program.outputs_of("bucket")}
        for bucket in [b for b in self.program.buckets if b.name in packs]:
            flat, own = packs[bucket.name], final[bucket.name]
            if own in made and made[own].op == "comm.all_reduce":  # done in place
                own = made[own].refs()[0]
            if self.program.zero < 2 or own == flat:
                self.flats.append(flat)
                continue
            self.taken[flat] = bucket.numel
            self.flats.append(f"{bucket.name}_part")
            if made[own].op in ("comm.reduce_scatter", "autopar.accumulate"):
                self.parts[own] = self.flats[-1]
        if self.program.zero == 0:  # the sums of all owners go where the shares were
            summed = {b.name for b in self.program.buckets if b.partial and b.partial == b.axes}
            self.parts = {v: packs[name] for name, v in final.items() if name in summed and made[v].op == "comm.all_gather"}
        if self.program.zero < 3:
            return
        for node in self.program.nodes:
            if node.op == "comm.all_gather" and node.args[0].name in self.buckets:
                self.gathered[node.name] = node.name
            elif refs := [r for r in node.refs() if r in self.gathered]:
                if may_view(node) or node.op.startswith("comm."):  # a collective reads its operand until it is done
                    self.gathered.update(dict.fromkeys(filter(None, node.outs), self.gathered[refs[0]]))

    def is_begun(self, node: Node) -> bool:
        """Whether a gather is one of a bucket that the caller has begun: of those that aren't repeated, one that nothing comes before."""
        if node.args[0].name not in self.buckets or self.program.zero == 3 and self.program.microbatches > 1:
            return False
        return self.program.zero < 3 or not self.statements

    def script(self) -> Script:
        """The driver as data, once its text is made."""
        return Script(tuple(self.statements), tuple(self.after), dict(self.over), frozenset(self.born))

    def constant_nodes(self) -> set[int]:
        """Nodes that depend on nothing that changes from step to step; not what a step gives away, which its caller may write to."""
        known = {i.name for i in self.program.inputs if i.kind in ("const", "tangent")}
        given = {o.value for o in self.program.outputs}
        found = set()
        for n, node in enumerate(self.program.nodes):
            own = node.op in ("autopar.accumulate", "autopar.pack") or node.op.startswith("comm.") or not given.isdisjoint(node.outs)
            if not own and "mb" not in repr(_offsets(node)):
                if all(r in known for r in node.refs()):
                    known.update(o for o in node.outs if o)
                    found.add(n)
        return found

    def region(self, region: Region, nodes: list[Node], finals: set[str]) -> None:
        """Statements of one region: segments between collectives, waits before first uses."""
        run: list[Node] = []
        pending: list[str] = []  # collectives started and not waited for
        views: dict[str, list[Node]] = {}  # members of a bucket that is still being gathered
        source: dict[str, str] = {}

        def flush() -> None:
            if run:
                wait({r for n in run for r in n.refs()})
                self.segment(list(run), finals, region)
                run.clear()

        def wait(reads: Iterable[str]) -> None:
            wanted = {source.get(r, r) for r in reads}
            for value in [v for v in pending if v in wanted]:
                pending.remove(value)
                self.statements.append(
                    _Statement(assign(value, f"{value}.wait", [], self.indent(region), self.comment(value)), [value], [value], region)
                )
                for node in views.pop(value, []):
                    self.view(node, region)

        for node in nodes:
            if node.op == "autopar.accumulate":
                flush()
                wait(node.refs())
                self.accumulate(node)
            elif node.op == "autopar.microbatch":
                flush()
                wait(node.refs())
                self.view(node, region)
            elif node.op == "autopar.member":
                (bucket,) = node.refs()
                if bucket in pending:
                    views.setdefault(bucket, []).append(node)
                    source[node.outs[0]] = bucket
                else:
                    flush()
                    self.view(node, region)
            elif node.op == "autopar.pack":
                flush()
                wait(node.refs())
                self.pack(node, region)
            elif node.op == "comm.all_gather" and self.is_begun(node):
                self.gathers[node.args[0].name] = node.outs[0]
                pending.append(node.outs[0])
            elif node.op.startswith("comm."):
                flush()
                wait(node.refs())
                if node.refs()[0] in self.taken:
                    if len(self.reducing) == REDUCING:  # its memory is needed for the next
                        wait([self.reducing.pop(0)])
                    self.reducing.append(node.outs[0])
                self.start(node, region)
                pending.append(node.outs[0])
            else:
                if run and (layer_of(run[0].where.module), run[0].phase) != (layer_of(node.where.module), node.phase):
                    flush()
                if {source.get(r, r) for r in node.refs()} & set(pending):
                    flush()
                    wait(node.refs())
                run.append(node)
        flush()
        under_way = {o.value for o in self.program.outputs_of("bucket")}  # the caller waits for the last reductions
        wait([v for v in pending if v not in under_way])

    def find_born(self, nodes: list[Node]) -> None:
        """Gradients whose op can write them where they belong, also where further shares are added to them there.

        Not in compiled segments, which own their memory.
        """
        if self.tensor_sites:
            return
        producers = {o: n for n in nodes for o in n.outs if o}
        for pack in nodes:
            if pack.op != "autopar.pack" or pack.region != "body":  # what is packed behind the loop is a sum
                continue
            offset = 0
            for ref in pack.args[0]:
                shape, first = self.program.types[ref.name].shape, ref.name
                while self.over.get(first) == 0:
                    first = producers[first].refs()[0]
                if first in producers and producers[first].op in _MADE_IN_PLACE and self.uses[first] == 1:
                    self.born[first] = f"ops.member({pack.name}, {offset}, {shape})"
                    self.homes[first] = pack.name
                offset += math.prod(shape)

    def indent(self, region: Region) -> int:
        """Where the driver's statements of a region begin: those of the loop over microbatches are inside of it."""
        return 8 if region == "body" and self.program.microbatches > 1 else 4

    def start(self, node: Node, region: Region) -> None:
        value, axes, *rest = node.args
        args = [value.name, _axes(axes), *(f'"{r}"' if isinstance(r, str) else str(r) for r in rest), f'site="{node.where.module}"']
        reads = [value.name]
        if value.name in self.taken:
            args.append("spent=True")
        if node.outs[0] in self.parts:
            reads.append(self.parts[node.outs[0]])
            args.append(f"out={reads[1]}")
        elif node.op == "comm.all_gather" and value.name in self.buckets:
            kind = self.program.types[node.outs[0]]
            args.append(f"out=comm.empty({kind.numel}, {kind.dtype})")
        elif node.op == "comm.all_reduce" and node.where.module in self.buckets:
            args.append(f"out={value.name}")
        elif node.op == "comm.reduce_scatter" and value.name in self.flats:  # its memory is ours to write to
            part = self.program.types[node.outs[0]].shape[0]
            args.append(f"out=ops.own({value.name}, comm, {_axes(axes)}, {part})")
        function = f"comm.{node.op.removeprefix('comm.')}"
        self.statements.append(
            _Statement(assign(node.outs[0], function, args, self.indent(region)), [node.outs[0]], reads, region, node.outs[0], (node,))
        )

    def pack(self, node: Node, region: Region) -> None:
        """Gradients into the flat tensor of their bucket, which the caller gave."""
        self.take(node.name, region)
        pieces = [r.name for r in node.args[0]]
        args = [f"({', '.join(pieces)}{',' if len(pieces) == 1 else ''})", node.name]
        lines = assign(node.name, "ops.pack_into", args, self.indent(region), self.comment(node.name))
        self.statements.append(_Statement(lines, [node.name], [*pieces, node.name], region, nodes=(node,)))

    def take(self, flat: str, region: Region) -> None:
        """Memory for the gradients of a bucket, where the caller gave none and none was taken yet."""
        if flat in self.taken and flat not in self.open:
            self.open.add(flat)
            args = [str(self.taken[flat]), str(self.program.types[flat].dtype)]
            self.statements.append(_Statement(assign(flat, "comm.empty", args, self.indent(region)), [flat], [], region))

    def view(self, node: Node, region: Region) -> None:
        """A parameter as a view of its gathered bucket: the driver's, so that layers share their segments."""
        function, args = call(node, lambda v: v, lambda v: offset(v) if isinstance(v, Offset) else str(v.value))
        lines = assign(node.outs[0], function, args, self.indent(region), self.comment(node.outs[0]))
        self.statements.append(_Statement(lines, [node.outs[0]], list(node.refs()), region, nodes=(node,)))

    def accumulate(self, node: Node) -> None:
        """Adds this turn's share to a total: the last thing a turn does with the value."""
        value, combine = node.args
        total, reads, indent = node.outs[0], [value.name], self.indent("body")
        if total in self.parts:
            reads.append(self.parts[total])
            lines = assign(total, "ops.sum_into", [reads[1], value.name, total], indent)
        else:
            lines = assign(total, "ops.accumulate", [total, value.name, f'"{combine}"'], indent)
        self.statements.append(_Statement(lines, [total], reads, "body", "accumulate", (node,)))

    def segment(self, nodes: list[Node], finals: set[str], region: Region) -> None:
        """A function for a run of nodes, shared with every run of the same text, and the call of it."""
        inside = {o for n in nodes for o in n.outs if o}
        here = Counter(r for n in nodes for r in n.refs())
        results = [o for n in nodes for o in n.outs if o and (o in finals or self.uses[o] > here[o])]
        layer = layer_of(nodes[0].where.module)
        prefix = layer.replace(".", "_") + "_" if layer else ""
        names: dict[str, str] = {}
        params: list[str] = []
        arguments: list[str] = []

        def local(value: str) -> str:
            if value not in names:
                own = not prefix or prefix in value
                short = _LANE.sub("", value.replace(prefix, "", 1) if prefix else value)
                short = short if short.isidentifier() else f"x_{short}"
                if value not in inside:
                    if not own:
                        short = "x"
                    short = fresh_name(short, set(names.values()))
                    params.append(short)
                    arguments.append(value)
                names[value] = fresh_name(short, set(names.values())) if value in inside else short
            return names[value]

        def lift(value: Offset | Site) -> str:
            name = fresh_name("start" if isinstance(value, Offset) else "site", set(names.values()))
            names[name] = name
            params.append(name)
            number = offset(value) if isinstance(value, Offset) else str(value.value)
            varies = isinstance(value, Site) or "mb" in number
            arguments.append(f"torch.tensor({number})" if self.tensor_sites and varies else number)
            return name

        def place(value: str) -> str:
            self.take(self.homes[value], region)
            name = fresh_name("out", set(names.values()))
            names[name] = name
            params.append(name)
            arguments.append(self.born[value])
            return name

        body: list[str] = []
        dies = dying(nodes, self.program.types, self.over, results)
        for node, gone in zip(nodes, dies, strict=True):
            shown = node
            if node.op in _SITES:
                at = _SITES[node.op]
                shown = node.with_args(*node.args[:at], Site(node.args[at]), *node.args[at + 1 :])
            function, args = call(shown, local, lift, over=self.over.get(node.name))
            if args is not None and node.name in self.born:
                args = [*args, f"out={place(node.name)}"]
            target = ", ".join(local(o) if o else "_" for o in node.outs)
            comment = "; ".join(self.comment(o) for o in node.outs[:1] if o)
            body += assign(target, function, args, 4, comment) + delete([local(v) for v in gone], 4)
        body += bracket("return (", [local(r) for r in results], 4) if len(results) > 1 else [f"    return {local(results[0])}"]
        text = "\n".join([*params, "->", *body])
        if text not in self.segments:
            stem = "_".join([re.sub(r"\W", "_", re.sub(r"\.?\d+$", "", layer)) or "model", nodes[0].phase])
            count = self.counts[stem] = self.counts.get(stem, 0) + 1
            self.segments[text] = f"{stem}_{count}"
            self.texts.append([*define(self.segments[text], params), *body])
        self.calls += 1
        name = self.segments[text]
        lines = assign(", ".join(results), name, arguments, self.indent(region))
        reads = [a for a in arguments if a in self.program.types] + [self.homes[v] for v in inside if v in self.homes]
        self.statements.append(_Statement(lines, results, reads, region, nodes=nodes, dies=dies))

    def comment(self, value: str) -> str:
        """Local type, and the sharding where the value has one."""
        kind = self.program.types[value]
        sharding = self.program.shardings.get(value)
        text = f"{dtype_name(kind.dtype)}[{', '.join(map(str, kind.shape))}]"
        return f"{text} of {sharding}" if sharding is not None and sharding.placements else text

    def mesh(self) -> str:
        """The ranks that run the module, in words."""
        return str(self.program.mesh) or "one rank"

    def header(self) -> list[str]:
        return [
            f'"""{self.title or "The training step of one rank."}',
            "",
            f"Mesh: {self.mesh()}. Ranks differ only in the coordinates that their comm holds.",
            '"""',
            "",
            "import torch",
            "",
            "from autopar.runtime import ops",
            "",
            "aten = torch.ops.aten",
            "",
            "",
        ]

    def constants(self, nodes: list[Node], shared: list[str]) -> list[str]:
        """Tensors that are the same in every step, made once."""
        p = self.program
        needed = set(shared)
        kept = []
        for node in reversed(nodes):
            if any(o in needed for o in node.outs):
                needed.update(node.refs())
                kept.append(node)
        lines = ["def constants(comm, consts):", '    """Tensors that no step changes, made once."""']
        body: list[str] = []
        consts = [i for i in p.inputs_of("const")]
        if consts:
            body += bracket("(", [i.name for i in consts], 4)
            body[-1] += " = consts"
        for i in p.inputs_of("tangent"):
            if i.name in needed:
                kind = p.types[i.name]
                body += assign(i.name, "torch.ones", [str(kind.shape), f"dtype={kind.dtype}", "device=comm.device"], 4)
        for node in reversed(kept):
            extra = {"device": "comm.device"} if not node.refs() else {}
            function, args = call(
                node, lambda v: v, lambda v: offset(v).replace('c["', 'comm.coords["') if isinstance(v, Offset) else str(v.value), extra
            )
            body += assign(", ".join(o or "_" for o in node.outs), function, args, 4, self.comment(node.name))
        result = bracket("return (", shared, 4) if shared else ["    return ()"]
        return [*lines, *body, *result, "", ""]

    def driver(self, shared: list[str]) -> list[str]:
        """The segments' functions, then ``step``."""
        p = self.program
        lines = [line for text in self.texts for line in [*text, "", ""]]
        lines += ["def step(comm, params, buckets, buffers, batch, grads, constants, key):", '    """One rank\'s step."""']
        uses_c = any("c[" in line for s in self.statements for line in s.lines)
        if uses_c:
            lines.append("    c = comm.coords")
        for kind, argument in (("param", "params"), ("bucket", "buckets"), ("buffer", "buffers"), ("batch", "batch")):
            names = [i.name if p.zero == 3 else self.gathers.get(i.name, i.name) for i in p.inputs_of(kind)]
            if kind == "bucket" and p.zero == 3:  # parts are gathered again
                names += self.gathers.values()
            if names:
                lines += bracket("(", names, 4)
                lines[-1] += f" = {argument}"
        if self.flats:
            lines += bracket("(", list(self.flats), 4)
            lines[-1] += " = grads"
        if shared:
            lines += bracket("(", shared, 4)
            lines[-1] += " = constants"
        lines += self.body()
        losses = [o.value for o in p.outputs_of("loss")]
        parts = [losses[0] if losses else "None"]
        for kind in ("bucket", "buffer", "output"):
            values = [o.value for o in p.outputs_of(kind)]
            parts.append(f"({', '.join(values)}{',' if len(values) == 1 else ''})")
        returned = bracket("return ", parts, 4, "")
        if len(returned) > 1:
            returned = bracket("return (", parts, 4)
        return [*lines, *returned]

    def end(self, values: list[str], indent: int) -> list[str]:
        """Lines behind the last use of values."""
        return [*self.given(values, indent), *delete(values, indent)]

    def given(self, values: list[str], indent: int) -> list[str]:
        """Memory that was taken for a gather is given back."""
        return [f"{' ' * indent}comm.give({v})" for v in values if self.gathered.get(v) == v]

    def body(self) -> list[str]:
        """Statements in order with the deletions; those of the loop indented."""
        p = self.program
        kept = {o.value for o in p.outputs} | {
            i.name for i in p.inputs if i.kind in ("const", "tangent", "param", "bucket", "buffer", "key")
        }
        last: dict[str, int] = {}
        for n, s in enumerate(self.statements):
            for v in (*s.reads, *s.defines):
                last[v] = n
                if v in self.gathered:
                    last[self.gathered[v]] = n
        looped = p.microbatches > 1
        defined_in = {v: s.region for s in self.statements for v in s.defines}
        loop = [n for n, s in enumerate(self.statements) if s.region == "body"]
        end = loop[-1] if loop and looped else -1
        dead: dict[int, list[str]] = {}
        for value, n in last.items():
            if value in kept:
                continue
            outside = defined_in.get(value, "pre") != "body"
            if looped and self.statements[n].region == "body" and outside:
                n = end
                dead.setdefault(-2, []).append(value)
                continue
            dead.setdefault(n, []).append(value)
        lines: list[str] = []
        totals = [v for s in self.statements if s.starts == "accumulate" for v in s.defines]
        for n, s in enumerate(self.statements):
            inner = looped and s.region == "body"
            if inner and n == loop[0]:
                lines += [f"    {t} = None" for t in totals]
                lines.append(f"    for mb in range({p.microbatches}):")
            lines += s.lines
            gone = [v for v in dead.get(n, []) if v not in totals or not inner]
            s.gone = gone
            lines += self.end(gone, 8 if inner else 4)
            if looped and n == end:
                self.after = [v for v in dead.get(-2, []) if v not in totals]
                lines += self.end(self.after, 4)
        return lines


def _axes(axes: tuple[str, ...]) -> str:
    return "(" + ", ".join(f'"{a}"' for a in axes) + ("," if len(axes) == 1 else "") + ")"


def _offsets(node: Node) -> list[Offset]:
    found: list[Offset] = []

    def walk(tree: object) -> None:
        if isinstance(tree, Offset):
            found.append(tree)
        elif isinstance(tree, tuple):
            for t in tree:
                walk(t)

    walk(node.args)
    return found


def delete(values: list[str], indent: int) -> list[str]:
    """``del`` lines for values, as many on a line as fit."""
    pad, lines = " " * indent, []
    while values:
        take = 1
        while take < len(values) and len(pad) + 4 + len(", ".join(values[: take + 1])) <= 140:
            take += 1
        lines.append(f"{pad}del {', '.join(values[:take])}")
        values = values[take:]
    return lines
