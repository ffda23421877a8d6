"""The package as a whole: what importing it does, how its modules depend on each other, what its docs say."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import numba_mla

PACKAGE = Path(numba_mla.__file__).parent

# Bottom first: a module may import from its own row and from those before it. `numba_mla` itself comes late, so
# that no module of the package leans on its public names.
LAYERS = (
    ("_version", "errors", "memory", "checks", "reference"),
    ("isa", "quant"),
    ("codegen",),
    ("kernels",),
    ("runtime", "parallel"),
    ("jit", "ops", "machine"),
    ("families", "rope"),
    ("config",),
    ("batch", "chunks", "pages", "paths", "safetensors_file"),
    ("storage",),
    ("cache", "checkpoint", "materialise"),
    ("attention",),
    ("layer",),
    ("info", "testing"),
    ("lab",),
    ("tuning",),
    ("public",),
    ("numba_mla",),
    ("check",),
    ("trial",),
    ("cli",),
    ("integrations",),
)
FOREIGN_ONLY_IN_INTEGRATIONS = ("torch", "transformers", "vllm")
NOT_ON_IMPORT = (*FOREIGN_ONLY_IN_INTEGRATIONS, "matplotlib", "pandas", "typer", "rich", "numba_mla.lab")


def module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def row_of(module):
    head = module.split(".")[1] if "." in module else module
    return next((index for index, names in enumerate(LAYERS) if head in names), None)


def imports_of(module):
    """Every module that `module` imports, at its top or inside a function."""
    tree = ast.parse(MODULES[module].read_text())
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            levels = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*levels, *filter(None, [node.module])])
            for alias in node.names:
                full = f"{source}.{alias.name}"
                yield full if full in MODULES else source


def internal_imports(module):
    return {name for name in imports_of(module) if name == "numba_mla" or name.startswith("numba_mla.")}


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_only_downward(module):
    row = row_of(module)
    assert row is not None, f"{module} has no row in LAYERS: give it one"
    upward = {name for name in internal_imports(module) if row_of(name) is None or row_of(name) > row}
    assert not upward, f"{module} imports from above itself"


def test_no_import_cycles():
    graph = {module: internal_imports(module) - {module} for module in MODULES}
    while leaves := {module for module, needs in graph.items() if not needs}:
        graph = {module: needs - leaves for module, needs in graph.items() if module not in leaves}
    assert not graph, "modules that import each other in a circle, or lean on one that does"


@pytest.mark.parametrize("module", MODULES)
def test_foreign_frameworks_stay_in_integrations(module):
    foreign = {name.split(".")[0] for name in imports_of(module)} & set(FOREIGN_ONLY_IN_INTEGRATIONS)
    assert not foreign or module.startswith("numba_mla.integrations.")


def test_the_reference_imports_numpy_and_ml_dtypes_alone():
    third_party = {name.split(".")[0] for name in imports_of("numba_mla.reference")} - sys.stdlib_module_names
    assert third_party <= {"numpy", "ml_dtypes"}


def run_fresh(code):
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_stays_light():
    code = f"import sys, numba_mla; print([name for name in {NOT_ON_IMPORT!r} if name in sys.modules])"
    assert run_fresh(code) == "[]"


def test_import_compiles_nothing():
    """Neither Numba's compiler runs nor LLVM text is parsed while the package is imported."""
    code = """
import llvmlite.binding, numba
from numba.core import event
numba.njit(lambda x: x)  # the first decorator of a process sets up the compiler
seen = []
parse = llvmlite.binding.parse_assembly
llvmlite.binding.parse_assembly = lambda *args, **kwargs: seen.append("llvm") or parse(*args, **kwargs)
class Listener(event.Listener):
    on_start = lambda self, event: seen.append(event.kind)
    on_end = lambda self, event: None
event.register("numba:compile", Listener())
import numba_mla
print(seen)
numba.njit(lambda x: x + 1)(1)  # the probes themselves must be able to see a compilation
assert "numba:compile" in seen and "llvm" in seen, seen
"""
    assert run_fresh(code) == "[]"


def documented_names(docstring, section):
    """The names listed in one numpydoc section of a docstring."""
    found = re.search(rf"^{section}\n-+\n(.*?)(?=^\S[^\n]*\n-{{3,}}\n|\Z)", docstring, re.M | re.S)
    lines = found.group(1).splitlines() if found else []
    heads = [line.partition(" : ")[0].rstrip() for line in lines if re.match(r"\*{0,2}[A-Za-z_]", line)]
    return [name.strip().lstrip("*") for head in heads for name in head.split(",")]


def arguments_of(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


def public_callables():
    """Every public function, class and public method, by the name a user writes."""
    for name in numba_mla.__all__:
        thing = getattr(numba_mla, name)
        if not callable(thing):
            continue
        yield pytest.param(thing, id=name)
        if inspect.isclass(thing):
            for method, found in vars(thing).items():
                member = getattr(found, "__func__", found)  # of a classmethod
                if inspect.isfunction(member) and (not method.startswith("_") or method == "__call__"):
                    yield pytest.param(member, id=f"{name}.{method}")


@pytest.mark.parametrize("thing", list(public_callables()))
def test_documented_arguments_are_the_signature(thing):
    docstring = inspect.getdoc(thing) or ""
    assert docstring, "has no docstring"
    if inspect.isclass(thing) and issubclass(thing, BaseException):
        return
    documented = documented_names(docstring, "Parameters") or documented_names(docstring, "Attributes")
    assert documented == [name for name in arguments_of(thing) if name != "cls"]


@pytest.mark.parametrize("name", [n for n in numba_mla.__all__ if inspect.isfunction(getattr(numba_mla, n))])
def test_public_functions_show_an_example(name):
    assert ">>> " in inspect.getdoc(getattr(numba_mla, name))
