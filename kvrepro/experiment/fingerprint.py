"""Which code decides a row: a hash of all definitions that a function reaches, and of the data that it gets.

A definition is what a module binds at its top level: a function, a class, a constant. Names are followed through
imports within this project; comments, docstrings, layout and the messages of an InputError do not count, nor do other
packages. The catalogue is not followed, because a row depends on its own policy only, whose parameters and functions
are part of the data (`describe`). Nor are regimes that the engine only tells apart, because a row depends on the one
that its study names.
"""

import ast
import dataclasses
import functools
import hashlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from kvrepro.engine.regime import REGIMES
from kvrepro.paths import CODE

Name = tuple[str, str]  # module, and a name that it binds
# Not followed: each row's own policy and regime count by themselves. A name "" is all of a module, or of a package.
UNFOLLOWED = frozenset({("kvrepro.engine.catalogue", "CATALOGUE"), ("kvrepro.engine.policy", "OWN"),
                        ("kvrepro.engine.regime", "REGIMES")})  # fmt: skip
REGIME_CLASSES = frozenset((kind.__module__, kind.__name__) for kind in REGIMES.values())
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
PLAIN = frozenset({type(None), bool, int, str})  # values that describe themselves, such as a prompt's thousand tokens
INNER = SCOPES + COMPREHENSIONS
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def digest(*parts: Any) -> str:
    """sha256, first 16 hex digits, of parts as canonical JSON."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def of(*values: Any, **left_out: frozenset[Name]) -> str:
    """Hash of all that decides a result: functions, with the code that they reach, and data. left_out: as in `code`."""
    return digest([describe(value, (), **left_out) for value in values])


# ---- code of this project, as it stands in its files


class Module:
    """What one source file binds, and where its imports lead."""

    def __init__(self, name: str, source: str):
        self.name = name
        self.definitions: dict[str, list[ast.stmt]] = {}
        self.imports: dict[str, tuple[str, str]] = {}  # local name -> (module, name in it or "")
        self._texts: dict[str, str] = {}
        loose = []
        for statement in ast.parse(source).body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                self.imports |= imports(statement)
            elif names := bound(statement):
                for name in names:
                    self.definitions.setdefault(name, []).append(statement)
            elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                loose.append(statement)
        for statement in loose:  # REGISTRY.update(...) belongs to REGISTRY; a change of another module, to all of this
            read = [root for root, *_ in chains(statement)]
            elsewhere = bool(read) and read[0] in self.imports
            for name in self.definitions if elsewhere else self.definitions.keys() & set(read):
                self.definitions[name].append(statement)

    def text(self, name: str) -> str:
        """A definition without comments, docstrings and layout."""
        if name not in self._texts:
            self._texts[name] = "\n".join(map(plain, self.definitions[name]))
        return self._texts[name]


class Code:
    """The project's modules, read from `folders` (top-level package -> its folder) when they are needed."""

    def __init__(self, folders: Mapping[str, Path] = CODE):
        self.folders = folders
        self._modules: dict[str, Module | None] = {}
        self._reads: dict[Name, list[Name]] = {}

    def module(self, name: str) -> Module | None:
        """A module by its dotted name; None for a module that is not of this project."""
        if name not in self._modules:
            root, *rest = name.split(".")
            path = self.folders[root].joinpath(*rest) if root in self.folders else None
            files = [path.with_suffix(".py"), path / "__init__.py"] if path else []
            file = next((file for file in files if file.is_file()), None)
            self._modules[name] = Module(name, file.read_text(encoding="utf-8")) if file else None
        return self._modules[name]

    def reached(
        self, *roots: Name, unfollowed: frozenset[Name] = UNFOLLOWED, apart: frozenset[Name] = frozenset()
    ) -> dict[Name, str]:
        """Source of every definition that the roots reach, themselves included, by (module, name).

        apart: definitions that the engine does not run for these roots, such as those of other regimes; they count only
        where code outside the engine reads them.
        """
        sources: dict[Name, str] = {}
        queue: list[tuple[Name | None, Name]] = [(None, root) for root in roots]
        while queue:
            reader, name = queue.pop()
            module = self.module(name[0])
            if name in sources or module is None or name[1] not in module.definitions:
                continue
            if _within(name, unfollowed):
                continue
            if reader is not None and _of_engine(reader) and _within(name, apart) and not _within(reader, apart):
                continue
            sources[name] = module.text(name[1])
            queue += [(name, read) for read in self._read_by(module, name)]
        return sources

    def _read_by(self, module: Module, reader: Name) -> list[Name]:
        """The definitions that one of a module's definitions reads directly."""
        if reader not in self._reads:
            self._reads[reader] = []
            for node in module.definitions[reader[1]]:
                local = {k: v for n in ast.walk(node) if isinstance(n, (ast.Import, ast.ImportFrom))
                         for k, v in imports(n).items()}  # fmt: skip
                seen = {**module.imports, **local}
                for chain in chains(node):
                    self._reads[reader] += self._definitions_of(module, seen, chain)
            if _of_engine(reader):  # which tells regimes apart, as in `isinstance(c.regime, SharedCap)`, and makes none
                others = {name for name in REGIME_CLASSES if name[0] != reader[0]}
                self._reads[reader] = [name for name in self._reads[reader] if name not in others]
        return self._reads[reader]

    def _definitions_of(
        self, module: Module, imports: Mapping[str, tuple[str, str]], chain: list[str]
    ) -> Iterator[Name]:
        """The definitions that a dotted name means: one, or all of a module where the name is a module's."""
        root, *rest = chain
        if root not in imports:
            if root in module.definitions:
                yield module.name, root
            return
        target, name = imports[root]
        parts = [name, *rest] if name else rest
        while parts and (inner := f"{target}.{parts[0]}") and self.module(inner) is not None:
            target, parts = inner, parts[1:]
        holder = self.module(target)
        if holder is None:
            return
        if not parts:
            yield from ((target, definition) for definition in holder.definitions)
        elif parts[0] in holder.definitions:
            yield target, parts[0]
        elif parts[0] in holder.imports:
            yield from self._definitions_of(holder, holder.imports, parts)


def _within(name: Name, names: frozenset[Name]) -> bool:
    """Whether a name is one of these, or its whole module or package is."""
    return not names.isdisjoint({name, (name[0], ""), (name[0].partition(".")[0], "")})


def _of_engine(name: Name) -> bool:
    return name[0].startswith("kvrepro.engine.")


def imports(node: ast.Import | ast.ImportFrom) -> dict[str, tuple[str, str]]:
    """Local name -> (module, name in it; "" for the module itself)."""
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name: (node.module or "", alias.name) for alias in node.names}
    return {alias.asname or root: (alias.name if alias.asname else root, "")
            for alias in node.names for root in [alias.name.partition(".")[0]]}  # fmt: skip


def bound(node: ast.AST) -> set[str]:
    """Names that a statement binds in its own scope; `x[...] = y` counts as x."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    names = set()
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, INNER) or hasattr(child, "name"):
            names |= bound(child)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        names.add(node.id)
    if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, ast.Store):
        names |= {chain[0] for chain in chains(node.value)}
    return names


def chains(node: ast.AST, hidden: frozenset[str] = frozenset()) -> Iterator[list[str]]:
    """Dotted names below a node that it reads from outside its own scopes."""
    parts: list[str] = []
    inner = node
    while isinstance(inner, ast.Attribute):
        parts, inner = [inner.attr, *parts], inner.value
    if isinstance(inner, ast.Name):
        if inner.id not in hidden and (parts or not isinstance(inner.ctx, ast.Store)):
            yield [inner.id, *parts]
        return
    node = inner
    if isinstance(node, SCOPES):
        a = node.args
        parameters = {arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if arg}
        body = node.body if isinstance(node.body, list) else [node.body]
        globals_ = {name for n in ast.walk(node) if isinstance(n, ast.Global) for name in n.names}
        inside = hidden | (parameters.union(*(bound(statement) for statement in body)) - globals_)
        for child in ast.iter_child_nodes(node):  # defaults, decorators and annotations are read outside
            yield from chains(child, inside if child in body else hidden)
        return
    if isinstance(node, COMPREHENSIONS):
        hidden = hidden.union(*(bound(generator.target) for generator in node.generators))
    for child in ast.iter_child_nodes(node):
        yield from chains(child, hidden)


def plain(node: ast.AST) -> str:
    """Source without comments, docstrings, layout and what an InputError says, since only its class decides rows; as a
    text that is the same in every version of Python."""
    return json.dumps(_tree(node))


def _tree(part: Any) -> Any:
    """A syntax tree as lists; the texts of `ast.unparse` and `ast.dump` differ between versions of Python."""
    if isinstance(part, list):
        return [_tree(item) for item in part]
    if not isinstance(part, ast.AST):
        return repr(part)
    parts = {name: getattr(part, name, None) for name in part._fields}
    if isinstance(part, ast.JoinedStr):  # 3.12 ends some with an empty text
        parts["values"] = [item for item in part.values if not (isinstance(item, ast.Constant) and item.value == "")]  # noqa: PD011
    if isinstance(part, ast.Raise) and isinstance(part.exc, ast.Call) and ast.unparse(part.exc.func) == "InputError":
        parts["exc"] = part.exc.func
    if isinstance(part, DOCUMENTED) and ast.get_docstring(part, clean=False) is not None:
        parts["body"] = part.body[1:] or [ast.Pass()]
    return [type(part).__name__, *([name, _tree(value)] for name, value in parts.items() if value not in (None, []))]


PROJECT = Code()


@cache
def code(*roots: Name, unfollowed: frozenset[Name] = frozenset(), apart: frozenset[Name] = frozenset()) -> str:
    """Hash of the code of this project that the roots reach. unfollowed, apart: as in `Code.reached`."""
    sources = PROJECT.reached(*roots, unfollowed=UNFOLLOWED | unfollowed, apart=apart)
    return digest(sorted([*name, text] for name, text in sources.items()))


# ---- values, and code from elsewhere: typed into a notebook, or in a reader's own file


def describe(value: Any, above: tuple[int, ...] = (), **left_out: frozenset[Name]) -> Any:
    """A value as JSON that changes whenever the value's meaning does. A function stands for the code that it reaches.

    Arrays and tensors are described by a hash of their bytes, a checkpoint by its own hash, objects of other libraries
    by their type and how they print themselves. above: ids of the values that hold this one. left_out: as in `code`.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if id(value) in above:
        return "itself"

    def inner(part: Any) -> Any:
        return describe(part, (*above, id(value)), **left_out)

    kind = type(value)
    if (unwrapped := _unwrapped(value)) is not None:
        return [kind.__name__, inner(unwrapped)]
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "state_dict") and not isinstance(value, type):  # a network, with its weights
        return [inner(kind), inner(vars(value))]
    if isinstance(value, bytes | np.ndarray | pd.DataFrame | pd.Series) or kind.__module__.startswith("torch"):
        return [kind.__name__, _bytes(value)]
    if isinstance(value, Mapping):
        return ["map", *sorted(([inner(k), inner(v)] for k, v in value.items()), key=json.dumps)]
    if isinstance(value, list | tuple):
        return list(value) if PLAIN.issuperset(map(type, value)) else [inner(part) for part in value]
    if isinstance(value, set | frozenset):
        return ["set", *sorted(map(inner, value), key=json.dumps)]
    if isinstance(value, functools.partial):
        return ["partial", inner(value.func), inner(value.args), inner(value.keywords)]
    if isinstance(value, MethodType):
        return ["method", inner(value.__func__), inner(value.__self__)]
    if isinstance(value, FunctionType | type):
        return _code_of(value, inner, left_out)
    if isinstance(value, ModuleType):
        return value.__name__
    if hasattr(value, "fingerprint"):
        return inner(value.fingerprint)
    if dataclasses.is_dataclass(value):
        return [inner(kind), [[f.name, inner(getattr(value, f.name))] for f in dataclasses.fields(value)]]
    if not _foreign(kind.__module__):
        return [inner(kind), inner(vars(value) if hasattr(value, "__dict__") else {})]
    return [kind.__qualname__, _printed(value)]


def _unwrapped(value: Any) -> Any:
    """The value behind a wrapper of another library: the function of `functools.cache`, `torch.no_grad()` or
    `np.vectorize`, of a class's static method or property, the names of a namespace; otherwise None."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    if isinstance(value, property):
        return [value.fget, value.fset, value.fdel]
    if isinstance(value, cached_property):
        return value.func
    if isinstance(value, np.vectorize | SimpleNamespace):
        return vars(value)
    if hasattr(value, "__wrapped__") and not isinstance(value, type):
        wrapper = getattr(value, "__globals__", {}).get("__name__", "functools")
        return value.__wrapped__ if _foreign(wrapper) else None
    return None


def _printed(value: Any) -> str:
    """How an object prints itself, without its address in memory."""
    return re.sub(r" at 0x\w+", "", repr(value))


def _bytes(value: Any) -> str:
    if isinstance(value, pd.DataFrame | pd.Series):
        value = pd.util.hash_pandas_object(value).to_numpy()
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()[:16]
    if hasattr(value, "detach") and not isinstance(value, type):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    if not isinstance(value, np.ndarray):
        return _printed(value)
    return digest(str(value.dtype), list(value.shape), hashlib.sha256(np.ascontiguousarray(value)).hexdigest())


def _code_of(
    value: Callable[..., Any] | type, inner: Callable[..., Any], left_out: Mapping[str, frozenset[Name]]
) -> Any:
    """A function or class of this project by the code that it reaches; one of another library by its name; any other by
    its source and the globals that it reads. inner: describes a part of the value."""
    module, top = value.__module__ or "", value.__qualname__.partition(".")[0]
    home = PROJECT.module(module)
    closed = [cell.cell_contents for cell in getattr(value, "__closure__", None) or () if _filled(cell)]
    if home is not None and top in home.definitions:
        return ["code", code((module, top), **left_out), inner(closed)]
    if home is None and _foreign(module):
        return f"{module}.{value.__qualname__}"
    if isinstance(value, type):
        skipped = ("__doc__", "__module__", "__dict__", "__weakref__")
        members = {
            name: inner(member) for name, member in vars(value).items()
            if name not in skipped and not name.startswith("_abc") and _is_plain_member(member)
        }  # fmt: skip
        return [value.__name__, [inner(base) for base in value.__bases__], members]
    try:
        if value.__name__ == "<lambda>":  # in the middle of a statement
            raise TypeError
        tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
        text: Any = plain(tree)
        used, held = list(chains(tree)), value.__globals__ | _imported(tree)
    except (OSError, SyntaxError, TypeError):
        text, used = _compiled(value.__code__), [[name] for name in _names(value.__code__)]
        held = value.__globals__
    reached = {".".join(chain): inner(_value_of(held, chain)) for chain in used if chain[0] in held}
    return [text, reached, inner(closed), inner(value.__defaults__), inner(value.__kwdefaults__)]


def _imported(tree: ast.AST) -> dict[str, Any]:
    """What a function imports itself, as far as that can be imported from here."""
    values = {}
    for node in ast.walk(tree):
        for local, (module, name) in imports(node).items() if isinstance(node, ast.Import | ast.ImportFrom) else ():
            with suppress(ImportError, AttributeError, ValueError):  # a function without a module beside it
                imported = import_module(module)
                values[local] = getattr(imported, name) if name else imported
    return values


def _compiled(code: CodeType) -> list[Any]:
    """A function without source, by its compiled code."""
    consts = [_compiled(const) if isinstance(const, CodeType) else repr(const) for const in code.co_consts]
    return [code.co_code.hex(), consts, list(code.co_names)]


def _names(code: CodeType) -> set[str]:
    """Names that compiled code reads from outside, including the code of its inner functions and comprehensions."""
    inside = [const for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*map(_names, inside))


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_plain_member(value: Any) -> bool:
    return not inspect.isgetsetdescriptor(value) and not inspect.ismemberdescriptor(value)


def _value_of(values: Mapping[str, Any], chain: list[str]) -> Any:
    """The value of a dotted name, followed as far as it leads through modules."""
    value = values[chain[0]]
    for name in chain[1:]:
        if not isinstance(value, ModuleType):
            break
        if _foreign(value.__name__):
            return ".".join(chain)
        value = getattr(value, name, None)
    return value


def _foreign(module: str) -> bool:
    """Whether a module belongs to Python or to an installed library, and not to this project or its reader."""
    top = module.partition(".")[0]
    if top in ("__main__", "<run_path>", *CODE):
        return False
    if top in sys.builtin_module_names or top in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return False
    return "site-packages" in file or file.startswith(sys.base_prefix) or _installed(_root(Path(file), module))


def _root(file: Path, module: str) -> Path:
    """The folder from which a module's top-level package was imported."""
    path = file.parent if file.stem == "__init__" else file
    return path.parents[min(module.count("."), len(path.parents) - 1)]


@cache
def _installed(folder: Path) -> bool:
    """Whether installers put packages there, wherever it lies: `pip install --target` takes any folder."""
    return next(folder.glob("*.dist-info"), None) is not None
