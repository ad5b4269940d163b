"""The allowed imports and the rules of ARCHITECTURE.md, checked by reading the source.

Here, a package is a folder or a module directly below `octavo`. All imports count, also those inside functions and for
type checkers.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "octavo"

EVERYBODY = {"core", "config.schema", "errors", "platform", "logging"}
"""What every package but these themselves may import."""

ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "logging": set(),
    "platform": {"_native"},
    "core": {"errors"},
    "config": EVERYBODY | {"builtin", "devices", "gguf"},
    "gguf": EVERYBODY | {"config.section"},
    "kv_cache": EVERYBODY,
    "kv_transfer": EVERYBODY | {"kv_cache"},
    "scheduler": EVERYBODY | {"kv_cache", "kv_transfer"},
    "speculation": EVERYBODY,
    "engine": EVERYBODY
    | {"config", "gguf", "scheduler", "speculation", "kv_cache", "kv_transfer", "executor"}
    | {"multimodal", "structured_output.grammars"},
    "multimodal": EVERYBODY | {"config"},
    "executor": EVERYBODY | {"worker", "__init__"},
    "worker": EVERYBODY
    | {
        "config",
        "models",
        "layers",
        "lora",
        "devices",
        "sampling",
        "attention",
        "ops",
        "quantization",
        "distributed",
        "kv_transfer.fetch_rates",
        "kv_transfer.file_store",
        "kv_transfer.host_folder",
        "kv_transfer.messages",
        "pipes",
        "structured_output",
        "__init__",
    },
    "models": EVERYBODY | {"config", "gguf", "layers", "quantization", "attention", "ops", "distributed"},
    "lora": EVERYBODY | {"models", "devices", "layers", "attention", "ops", "gguf"},
    "layers": EVERYBODY | {"quantization", "attention", "ops", "distributed"},
    "sampling": EVERYBODY,
    "structured_output": EVERYBODY | {"sampling"},
    "attention": EVERYBODY | {"ops"},
    "quantization": EVERYBODY | {"config", "ops"},
    "distributed": EVERYBODY | {"_native"},
    "pipes": EVERYBODY | {"kv_cache"},
    "ops": EVERYBODY,
    "devices": EVERYBODY | {"_native", "ops", "attention", "sampling"},
    "builtin": EVERYBODY,
    "llm": EVERYBODY | {"config", "engine"},
    "async_llm": EVERYBODY | {"config", "engine", "async_llm_engine"},
    "async_llm_engine": EVERYBODY | {"config", "engine", "async_llm"},
    "server": EVERYBODY
    | {"config", "engine", "async_llm", "multimodal", "__init__"}
    | {"structured_output.closed_schemas", "structured_output.grammars"},
    "deploy": EVERYBODY | {"config", "async_llm", "server"},
    "simulate": EVERYBODY | {"config", "engine", "scheduler", "speculation", "kv_cache", "kv_transfer"},
    "cli": EVERYBODY
    | {"config", "engine", "executor", "llm", "models", "server", "simulate", "speculation", "worker"}
    | {"__init__"},
    "__main__": {"cli"},
    "__init__": EVERYBODY | {"config", "engine", "llm", "async_llm", "async_llm_engine"},
}
"""Package → what it may import. A new package has to be entered here."""

TORCH_FREE = {
    "errors",
    "gguf",
    "logging",
    "platform",
    "core",
    "config",
    "kv_cache",
    "kv_transfer",
    "scheduler",
    "engine",
}
TORCH_FREE |= {"gguf", "multimodal", "server", "cli", "builtin", "deploy", "simulate", "speculation"}
TORCH_FREE |= {"llm", "async_llm", "async_llm_engine", "__init__", "__main__"}

MAY_READ_ENVIRONMENT = {"config/sources.py"}
MAY_SEE_WHOLE_CONFIG = {
    "octavo.engine.engine_core.EngineCore.build",
    "octavo.kv_transfer.build.make_connector",
    "octavo.worker.worker.Worker.__init__",
    "octavo.worker.start.ahead.read_ahead",
    "octavo.worker.start.opening.open_models",
    "octavo.worker.start.identity.Identity.of",
    "octavo.engine.input.input_processor.InputSetup.of",
    "octavo.async_llm.AsyncLLM.__init__",
    "octavo.engine.cores.replicas.Replicas.start",
    "octavo.engine.cores.remote_replicas.RemoteReplicas._replicas_of",
    "octavo.engine.cores.split.make_split",
}
"""Where parts are put together: the two halves of the core, what is begun before them, what ranks compare, and the two
fronts."""


class Import(NamedTuple):
    """One import of `module`, a full dotted name, at a line of a file."""

    file: Path
    line: int
    module: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.module}"


def source_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree(file)))


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


def package_of(module: str) -> str:
    """ "octavo.core.prompt" → "core"; octavo's own file is "__init__"."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def is_module(dotted: str) -> bool:
    path = ROOT.joinpath(*dotted.split("."))
    return path.with_suffix(".py").is_file() or path.with_suffix(".pyi").is_file() or (path / "__init__.py").is_file()


def imports(file: Path) -> Iterator[Import]:
    """Every import of a file by full name; `from octavo.config import hub` is an import of octavo.config.hub."""
    for node in nodes(file):
        if isinstance(node, ast.Import):
            yield from (Import(file, node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: write imports in full"
            assert node.module
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield Import(
                    file, node.lineno, inner if inner.startswith("octavo") and is_module(inner) else node.module
                )


@cache
def all_imports() -> list[Import]:
    return [found for file in source_files() for found in imports(file)]


def test_every_package_has_its_entry() -> None:
    packages = {package_of(module_name(file)) for file in source_files()}
    assert packages - {"__init__"} <= set(ARROWS)


def test_packages_import_only_what_the_arrows_allow() -> None:
    wrong, followed = [], set[tuple[str, str]]()
    for found in all_imports():
        if found.module.split(".")[0] != "octavo":
            continue
        source, target = package_of(module_name(found.file)), package_of(found.module)
        names = {
            name
            for name in ARROWS[source] | {source}
            if name == target or f"{found.module}.".startswith(f"octavo.{name}.")
        }
        followed.update((source, name) for name in names)
        if not names:
            wrong.append(str(found))
    assert not wrong, "\n".join(wrong)
    unused = {(source, name) for source, names in ARROWS.items() for name in names - EVERYBODY} - followed
    assert not unused, "arrows that no import follows"


def test_control_plane_never_imports_torch() -> None:
    wrong = [
        str(found)
        for found in all_imports()
        if found.module.split(".")[0] in ("torch", "triton") and package_of(module_name(found.file)) in TORCH_FREE
    ]
    assert not wrong, "\n".join(wrong)


def test_control_plane_loads_without_torch() -> None:
    """The same once more in earnest: importing it pulls torch in by no detour."""
    code = (
        "import sys, octavo.llm, octavo.async_llm, octavo.engine.engine_core, octavo.server.app, octavo.cli.main\n"
        "import octavo.simulate.replay\n"
        "sys.exit('torch is loaded' if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_model_imports_no_other_model() -> None:
    """Files with classes that are named after architectures are models; what they share lives in the others."""
    folder = PACKAGE / "models"
    models = {
        module_name(file)
        for file in folder.glob("*.py")
        if any(
            isinstance(node, ast.ClassDef) and node.name.endswith(("ForCausalLM", "LMHeadModel"))
            for node in tree(file).body
        )
    }
    assert models
    wrong = [str(i) for i in all_imports() if module_name(i.file) in models and i.module in models]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", ["pickle", "cloudpickle", "dill", "marshal", "shelve"])
def test_nothing_that_runs_code_from_data_is_imported(module: str) -> None:
    assert not [str(found) for found in all_imports() if found.module.split(".")[0] == module]


def test_environment_is_read_in_one_place() -> None:
    """config/sources.py turns variables into arguments; launching a process hands its environment on."""
    wrong = []
    for file in source_files():
        where = file.relative_to(PACKAGE).as_posix()
        if where in MAY_READ_ENVIRONMENT or where.startswith("executor/"):
            continue
        wrong += [
            f"{where}:{node.lineno}"
            for node in nodes(file)
            if (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"))
            or (isinstance(node, ast.ImportFrom) and node.module == "os" and _names(node) & {"environ", "getenv"})
        ]
    assert not wrong, "\n".join(wrong)


def test_paths_are_not_expanded_by_pathlib() -> None:
    """`Path.expanduser` raises RuntimeError for ~name of nobody, which a person or a request may write."""
    calls = [f"{file}:{node.lineno}" for file in source_files() for node in nodes(file) if _expands_a_path(node)]
    assert not calls, f"use os.path.expanduser: {calls}"


def _expands_a_path(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "expanduser"


def test_whole_configuration_is_taken_apart_only_where_parts_are_put_together() -> None:
    """Everybody else takes a section or single values; functions that only carry it to a builder look at no parts."""
    wrong = []
    for file in source_files():
        if package_of(module_name(file)) == "config":
            continue
        for name, function in functions(tree(file), module_name(file)):
            if name not in MAY_SEE_WHOLE_CONFIG and _reads_whole_config(function):
                wrong.append(name)
    assert not wrong, "\n".join(wrong)


def functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}.{child.name}", child
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from functions(child, f"{prefix}.{child.name}")
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from functions(child, prefix)


def _reads_whole_config(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """True when a parameter is the EngineConfig and the function looks into more than one of its sections."""
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    whole = {p.arg for p in parameters if p.annotation is not None and "EngineConfig" in ast.unparse(p.annotation)}
    sections = {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in whole
    }
    return len(sections) > 1


def _names(node: ast.ImportFrom) -> set[str]:
    return {alias.name for alias in node.names}


def test_every_folder_has_a_docstring() -> None:
    wrong = []
    for folder in sorted({file.parent for file in source_files()} - {PACKAGE}):
        init = folder / "__init__.py"
        text = (ast.get_docstring(tree(init)) or "") if init.is_file() else ""
        if len(text.splitlines()) < 3:
            wrong.append(f"{folder.relative_to(ROOT)}: needs an __init__.py with three lines: what, used by")
    assert not wrong, "\n".join(wrong)


def test_every_file_has_a_docstring() -> None:
    assert not [str(f.relative_to(ROOT)) for f in source_files() if not ast.get_docstring(tree(f))]


def test_errors_are_not_swallowed() -> None:
    """`except ...: pass` hides what went wrong; contextlib.suppress at least says what is expected."""
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in source_files()
        for node in nodes(file)
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or (len(node.body) == 1 and isinstance(node.body[0], ast.Pass)))
    ]
    assert not wrong, "\n".join(wrong)


MOST_LINES_OF_A_FILE = 399
MOST_LINES_OF_A_FUNCTION = 75
MOST_PARAMETERS = 8


def test_files_functions_and_parameter_lists_are_short() -> None:
    wrong = []
    for file in source_files():
        where, num_lines = file.relative_to(ROOT), len(file.read_text().splitlines())
        if num_lines > MOST_LINES_OF_A_FILE:
            wrong.append(f"{where} has {num_lines} lines, at most {MOST_LINES_OF_A_FILE}")
        for node in nodes(file):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            assert node.end_lineno is not None
            num_lines = node.end_lineno - node.lineno + 1
            if num_lines > MOST_LINES_OF_A_FUNCTION:
                wrong.append(f"{where}:{node.lineno}: {node.name} has {num_lines} lines")
            taken = node.args
            names = [each.arg for each in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)]
            # a kernel in Triton takes the members of its tensors one by one
            is_kernel = any(ast.unparse(each).startswith("triton.jit") for each in node.decorator_list)
            if len(set(names) - {"self", "cls"}) > MOST_PARAMETERS and not is_kernel:
                wrong.append(f"{where}:{node.lineno}: {node.name} has {len(names)} parameters")
    assert not wrong, "\n".join(wrong)
