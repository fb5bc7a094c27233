"""Who may import whom, read from the sources: the table of docs and DESIGN 2, with what building showed to be reasonable."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "autopar"

#: what every room may import beside itself, ``errors``, ``layout`` and ``ir`` (all three are values).
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "layout": set(),
    "ir": set(),
    "_torch": set(),
    "capture": {"_torch"},
    # rows name the ops that local programs call, and number random elements as the runtime does
    "rules": {"_torch", "runtime.ops", "runtime.random"},
    # whether an op's result is a view
    "cost": {"rules", "_torch"},
    # values alone, and not even ir: see below
    "schedule": set(),
    "plan": {"rules", "cost", "sources", "schedule"},
    # passes read a plan's layout; they put in calls of runtime ops, and look up torch's ops
    "passes": {"_torch", "rules", "cost", "plan", "runtime.ops", "runtime.random"},
    # what a stage's module is like is a value of the runtime; the ops that emitted text calls are tried on tensors without data
    "codegen": {"_torch", "cost", "runtime.stage", "runtime.ops"},
    "runtime": {"schedule"},
    # reports: everything but the surface
    # says on a stream what takes long
    "progress": set(),
    "inspect": {
        "applied",
        "_torch",
        "pipelined",
        "schedule",
        "capture",
        "rules",
        "cost",
        "plan",
        "passes",
        "codegen",
        "runtime",
        "compiler",
        "programs",
        "progress",
        "step",
    },
    # the order of the passes, on two screens
    "compiler": {"rules", "cost", "plan", "passes", "codegen", "progress", "finish", "pipelined", "runtime.executor"},
    "finish": {"rules", "cost", "plan", "passes", "codegen", "progress"},
    "pipelined": {"rules", "cost", "plan", "passes", "codegen", "progress", "finish", "schedule", "runtime.executor", "runtime.pipeline"},
    # the plain model run by one process, with the random numbers of the runtime, and its ops where torch has none for a dtype
    "reference": {"_torch", "capture", "passes", "runtime.ops", "runtime.random"},
    "compare": {"_torch", "capture", "compiler", "reference", "runtime", "plan", "rules"},
    # what ranks compare before they talk in tensors
    "agree": {"runtime"},
    "deal": {"runtime"},
    "sources": set(),
    # what of a plan really applied, told from what was compiled
    "applied": {"compiler", "cost", "passes", "plan"},
    "programs": {"_torch", "applied", "capture", "rules", "cost", "plan", "passes", "compiler", "progress"},
    "step": {"_torch", "agree", "deal", "programs", "progress", "capture", "passes", "plan", "codegen", "runtime", "compiler", "inspect"}
    | {"sources"},
    "api": {"*"},
    "cli": {"*"},
    "modelfile": {"*"},
    "train": {"*"},
    "__main__": {"*"},
    "": {"*"},
}
#: rooms that come to be: added here with their line when they are built.
LATER = {"modelfile": {"*"}, "train": {"*"}, "__main__": {"*"}}
OPEN = {"errors", "layout", "ir"}
#: these may not use ``ir``: generated code runs without it, and schedules know no program.
WITHOUT_IR = {"errors", "layout", "runtime", "schedule"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def imports(tree: ast.AST, path: Path) -> Iterator[tuple[str, ast.stmt]]:
    """Dotted names inside ``autopar`` that a module imports: ``layout.mesh.Mesh``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import in line {node.lineno}"
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in found:
            if name.split(".")[0] == "autopar":
                yield name.removeprefix("autopar").removeprefix("."), node


def ids(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", modules(), ids=ids)
def test_rooms(path: Path) -> None:
    room = room_of(path)
    table = {**LATER, **ALLOWED}
    assert room in table, f"the room {room!r} has no line in the table of imports"
    allowed, wrong = table[room], []
    for name, node in imports(ast.parse(path.read_text()), path):
        target = name.split(".")[0]
        free = target == room or target in OPEN and not (target == "ir" and room in WITHOUT_IR)
        if not (free or "*" in allowed or any(name == a or name.startswith(f"{a}.") for a in allowed)):
            wrong.append(f"line {node.lineno}: {room} may not import autopar.{name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", modules(), ids=ids)
def test_no_import_in_functions(path: Path) -> None:
    """Imports are at the top. ``launch`` waits with torch's launcher, and ``cli`` with torch itself: a mistyped option needs neither."""
    if path in (PACKAGE / "runtime" / "launch.py", PACKAGE / "cli.py"):
        return
    wrong = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            wrong += [n.lineno for n in ast.walk(node) if isinstance(n, (ast.Import, ast.ImportFrom))]
    assert not wrong, f"imports inside functions in lines {sorted(set(wrong))}"


@pytest.mark.parametrize("path", modules(), ids=ids)
def test_private_names_of_torch(path: Path) -> None:
    """``torch._x``, and what is imported from modules of such a name, only in ``_torch.py``."""
    if path == PACKAGE / "_torch.py":
        return
    wrong = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [dotted(node)]
        else:
            continue
        for name in names:
            parts = name.split(".")
            private = [p for p in parts[1:] if p.startswith("_") and not p.startswith("__")]
            # torch.ops holds ops by their names, and _foreach_ functions are public by torch's documentation
            if parts[0] == "torch" and private and parts[1] != "ops" and not private[0].startswith("_foreach"):
                wrong.append(f"line {node.lineno}: {name}")
    assert not wrong, "\n".join(wrong)


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of a chain of attributes; empty for any other expression at its root."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("path", modules(), ids=ids)
def test_environment(path: Path) -> None:
    """Only ``runtime/launch`` reads environment variables: those of torch's launcher."""
    if path == PACKAGE / "runtime" / "launch.py":
        return
    tree = ast.parse(path.read_text())
    wrong = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Attribute) and dotted(n) in ("os.environ", "os.getenv", "os.environb")]
    assert not wrong, f"reads the environment in lines {wrong}"


MUTATORS = {
    "append", "add", "update", "extend", "insert", "pop", "popitem", "remove", "discard", "clear", "setdefault", "appendleft", "sort",
}  # fmt: skip
#: grow without a bound. ``lru_cache`` with a size, on a function of values alone, is no state that anyone could see.
CACHES = {"cache", "cached"}


@pytest.mark.parametrize("path", modules(), ids=ids)
def test_no_state_in_modules(path: Path) -> None:
    """No function changes a module's names or what they hold, and none remembers all its results."""
    tree = ast.parse(path.read_text())
    held = {t.id for n in tree.body if isinstance(n, (ast.Assign, ast.AnnAssign)) for t in targets(n) if isinstance(t, ast.Name)}
    wrong = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            wrong.append(f"line {node.lineno}: global {', '.join(node.names)}")
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        for call in getattr(node, "decorator_list", []):
            name = dotted(call.func if isinstance(call, ast.Call) else call)
            if name.split(".")[-1] in CACHES:
                wrong.append(f"line {node.lineno}: {name}")
        own = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        own |= {a.arg for a in ast.walk(node) if isinstance(a, ast.arg)}
        for n in ast.walk(node):
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in MUTATORS:
                target = n.func.value
            elif isinstance(n, (ast.Subscript, ast.Attribute)) and isinstance(n.ctx, (ast.Store, ast.Del)):
                target = n.value
            else:
                continue
            if isinstance(target, ast.Name) and target.id in held - own:
                wrong.append(f"line {n.lineno}: changes {target.id}")
    assert not wrong, "\n".join(wrong)


def targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def test_names_of_the_surface_are_no_modules() -> None:
    """A module ``autopar.verify`` would take the place of the function once it is loaded."""
    init = ast.parse((PACKAGE / "__init__.py").read_text())
    (names,) = (n.value for n in init.body if isinstance(n, ast.Assign) and dotted(n.targets[0]) == "__all__")
    public = set(ast.literal_eval(names))
    files = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or p.is_dir()}
    assert public & files == {"errors"}


def test_runtime_loads_no_compiler() -> None:
    """What is loaded in fact, by a fresh process."""
    text = "import sys, autopar.runtime.executor, autopar.runtime.launch, autopar.runtime.optimizer, autopar.runtime.sim\n"
    text += "print(*sorted({m.split('.')[1] for m in sys.modules if m.startswith('autopar.')}))"
    out = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert set(out.stdout.split()) <= {"runtime", "layout", "errors"}
