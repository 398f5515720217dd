"""The public surface, the import rule, and what is relied on in other packages."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from grid import FIRSTS, PAIRS, SAMPLE, WITH_GRID
from models import ARCHITECTURES, TINY

import hf_posenc

ROOT = Path(__file__).parent.parent

PUBLIC = hf_posenc.__all__


def test_public_names_are_those_that_type_checkers_see() -> None:
    tree = ast.parse(Path(hf_posenc.__file__).read_text(encoding="utf-8"))
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    assert PUBLIC == dir(hf_posenc) == sorted(alias.asname for node in block.body for alias in node.names)
    assert all(callable(getattr(hf_posenc, name)) for name in PUBLIC)
    errors = [getattr(hf_posenc, name) for name in PUBLIC if name.endswith("Error")]
    assert all(issubclass(error, hf_posenc.PosencError) and issubclass(error, ValueError) for error in errors)
    code = "import hf_posenc; print(hf_posenc.errors.OptionError is hf_posenc.OptionError)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "True\n"
    with pytest.raises(AttributeError, match="no attribute 'patchh'"):
        hf_posenc.patchh  # noqa: B018


def test_public_documentation_says_what_it_takes_and_raises() -> None:
    for name in PUBLIC:
        assert inspect.getdoc(getattr(hf_posenc, name)), name
    for name in ("patch", "plan", "unpatch", "verify", "build", "attend"):
        text = inspect.getdoc(getattr(hf_posenc, name)) or ""
        assert "Raises:" in text, name


def test_every_scheme_documents_itself() -> None:
    for name, info in hf_posenc.schemes().items():
        description = hf_posenc.describe(name)
        assert info.summary.endswith("."), name
        assert all(option.text for option in description.options), name
        assert info.paper, name
        assert info.start


# Each storey may import those below it, and itself, also inside of functions and for types. A scheme knows no
# architecture; an architecture names no scheme.
ROOMS = [
    ("hf_posenc.errors",),
    ("hf_posenc.operands", "hf_posenc.ops", "hf_posenc.derivatives", "hf_posenc.facts", "hf_posenc.pictures"),
    ("hf_posenc.plugins",),
    ("hf_posenc.forms", "hf_posenc.equivalents"),
    ("hf_posenc.scheme", "hf_posenc.addons", "hf_posenc.blend", "hf_posenc.coordinates"),
    ("hf_posenc.registry", "hf_posenc.attention", "hf_posenc.schemes.families"),
    ("hf_posenc.schemes",),
    ("hf_posenc.patches",),
    ("hf_posenc.testing",),
    *((f"hf_posenc.recipes.{room}",) for room in (
        "storage", "intervals", "processes", "durations", "reports", "loading", "plots", "schema", "library",
        "data", "evaluation", "training", "memory", "goals", "runs", "comparison", "demo",
    )),
    ("hf_posenc.cli", "hf_posenc.__main__"),
]  # fmt: skip


def _room(module: str) -> int | None:
    for level, names in enumerate(ROOMS):
        if any(module == name or module.startswith(name + ".") for name in names):
            return level
    return None


def _sources() -> dict[str, Path]:
    found = {}
    for folder, package in (
        ("hf_posenc", "hf_posenc"),
        ("patches", "hf_posenc.patches"),
        ("recipes", "hf_posenc.recipes"),
    ):
        base = ROOT / folder
        for path in sorted(base.rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            if folder == "hf_posenc" and parts[0] in ("patches", "recipes"):
                continue
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


def _imports(path: Path, *, inside_functions: bool) -> set[str]:
    """Return the modules that a file imports, names imported from a package included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = ast.walk(tree) if inside_functions else iter(tree.body)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


def test_imports_point_one_way() -> None:
    sources = _sources()
    assert len(sources) > 30
    for module, path in sources.items():
        own = _room(module)
        if module in ("hf_posenc", "hf_posenc._auto", "hf_posenc.recipes"):
            continue  # the doors open every room, lazily
        assert own is not None, f"{module} is in no room: add it to ROOMS"
        for imported in _imports(path, inside_functions=True):
            level = _room(imported)
            assert level is None or level <= own, f"{module} imports {imported}, a later room"


def _core() -> dict[str, Path]:
    others = ("hf_posenc.patches", "hf_posenc.recipes", "hf_posenc.cli", "hf_posenc.__main__", "hf_posenc.testing")
    return {module: path for module, path in _sources().items() if not module.startswith(others)}


def test_the_core_works_without_transformers_and_imports_at_the_top() -> None:
    for module, path in _core().items():
        assert not any(name.split(".")[0] == "transformers" for name in _imports(path, inside_functions=True)), module
        # Triton may be missing.
        if not module.startswith("hf_posenc.attention.gpu"):
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
            inside = [node for function in functions for node in ast.walk(function)]
            found = [ast.unparse(node) for node in inside if isinstance(node, (ast.Import, ast.ImportFrom))]
            assert not found, f"{module} imports inside of a function: {found}"


# Names of schemes that are ordinary words, or those of both.
ORDINARY = {"near", "fire", "learned", "nope", "path", "repo", "rope", "t5"}
# Names of a scheme or an architecture outside of its file, the data of recipes and documentation. The table may only
# shrink: what another room needs to know of a scheme, the scheme declares.
NAMED: dict[str, set[str]] = {
    # Schemes that are built on others.
    "hf_posenc.schemes.cape": {"alibi", "kerple", "sandwich", "t5_clipped"},
    "hf_posenc.schemes.fox_pro": {"fox"},
    # The model of the demonstration, which is built in.
    "hf_posenc.cli.convert": {"llama"},
    "hf_posenc.cli.evaluate": {"llama"},
    "hf_posenc.recipes.loading": {"llama"},
    # The stock model of its hybrids.
    "hf_posenc.patches.llama": {"smollm3"},
    # The only model that it writes.
    "hf_posenc.patches.export.mlx": {"llama"},
    # A name in GGUF files.
    "hf_posenc.patches.export.gguf": {"llama"},
    # Hints.
    "hf_posenc.patches.export.restating": {"llama"},
}  # fmt: skip


def _words(path: Path) -> set[str]:
    """Return the words of all identifiers and strings of a file, without docstrings, in lower case."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bodies = [getattr(node, "body", None) for node in ast.walk(tree)]
    statements = [statement for body in bodies if isinstance(body, list) for statement in body]
    documentation = {id(one.value) for one in statements if isinstance(one, ast.Expr)}
    found: set[str] = set()
    for node in ast.walk(tree):
        texts = [getattr(node, field, None) for field in ("id", "attr", "arg", "name", "module")]
        if isinstance(node, ast.Constant) and id(node) not in documentation:
            texts.append(node.value)
        found |= {word.lower() for text in texts if isinstance(text, str) for word in re.findall(r"\w+", text)}
    return found


def test_schemes_and_architectures_are_named_in_their_own_files_only() -> None:
    # Those that other tests have read besides would depend on their order.
    names = {*hf_posenc.schemes(), *ARCHITECTURES, *TINY} - ORDINARY
    for module, path in _sources().items():
        named = (names & _words(path)) - {path.stem}
        allowed = NAMED.get(module, set())
        assert named <= allowed, f"{module} names {', '.join(sorted(named - allowed))}"
        assert named == allowed, f"{module} names {', '.join(sorted(allowed - named))} no longer: shrink NAMED"
    assert set(NAMED) <= set(_sources())


def test_the_table_of_pairs_has_every_scheme_and_architecture() -> None:
    """A new one needs a line in PAIRS in tests/grid.py; what is chosen there is said above it."""
    schemes, ours = hf_posenc.schemes(), {*ARCHITECTURES, *TINY}
    assert {*PAIRS} == {*schemes}
    assert {model for models in SAMPLE.values() for model in models} == ours
    for name, models in WITH_GRID.items():
        assert {*models} <= ours, name
        assert len({*models}) == len(models), name
        assert SAMPLE[name][0] in ARCHITECTURES, f"{name} generates on none of {ARCHITECTURES}"
        if name in FIRSTS:
            assert len({*ARCHITECTURES} & {*models}) > 1, f"{name}, the first with its seams: two of {ARCHITECTURES}"
            assert len(SAMPLE[name]) > 1, name


@pytest.mark.grid  # it starts processes
def test_importing_is_cheap_and_loads_nothing() -> None:
    """Modules that the pages name are there after it."""
    code = (
        "import sys, time, transformers; start = time.perf_counter(); import hf_posenc; "
        "print(time.perf_counter() - start, 'torch' in sys.modules); hf_posenc.coordinates; hf_posenc.plots"
    )
    seconds, torch_loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    # A hundred times what it takes; loading torch would take ten times this.
    assert float(seconds) < 0.3
    assert torch_loaded == "False"
