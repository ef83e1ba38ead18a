"""What makes rows stale: the code that decides them, and no other; on copies of the package with single edits."""

import importlib
import json
import linecache
import os
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from closures import closed_over
from edits import stale
from kvrepro.experiment.fingerprint import Code, chains, describe, of
from tiny import architecture, prompts

from kvrepro.chapters.leakage import runs
from kvrepro.chapters.synthesis import kept
from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.condition import Condition
from kvrepro.engine.generate import generate
from kvrepro.engine.policy import parameters_of
from kvrepro.engine.regime import REGIMES, Chunked, Prefill, Regime, SharedCap
from kvrepro.engine.usable import usable
from kvrepro.experiment import answers, fingerprint
from kvrepro.experiment.per_item import PerItem, PerItemPlan
from kvrepro.experiment.settings import Settings

GENERATE = ("kvrepro.engine.generate", "generate")


def package(tmp_path: Path, **files: str) -> Code:
    """A project of the given modules."""
    folder = tmp_path / "kvrepro"
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    return Code({"kvrepro": folder})


A = """
    import math
    from kvrepro import b
    from kvrepro.b import helper as help_me, Shape
    LIMIT = 3
    TABLE = {"x": 1}
    TABLE["y"] = b.unlikely

    def root(x, b=2):
        '''What it does.'''
        def inner():
            return LIMIT + local
        local = [LIMIT for LIMIT in range(3)]
        return help_me(x) + inner() + math.pi  # a comment

    def other():
        return TABLE

    class Kind(Shape):
        size: int = LIMIT

        def area(self):
            from kvrepro.c import late
            return late(self.size)
    """
B = """
    from kvrepro.c import deep

    def helper(x):
        if x is None:
            raise InputError(f"no number: {x}")
        return deep(x)

    def unlikely():
        return 0

    class Shape:
        pass
    """
C = """
    def deep(x):
        return x

    def late(x):
        return x

    def nobody():
        return 0
    """


def test_what_is_reached_follows_imports_locals_methods_and_tables(tmp_path):
    code = package(tmp_path, a=A, b=B, c=C)

    def reached(name):
        return {f"{module[-1]}.{name}" for module, name in code.reached(("kvrepro.a", name))}

    assert reached("root") == {"a.root", "a.LIMIT", "b.helper", "c.deep"}
    assert reached("other") == {"a.other", "a.TABLE", "b.unlikely"}
    assert reached("Kind") == {"a.Kind", "a.LIMIT", "b.Shape", "c.late"}


@pytest.mark.parametrize(
    ("file", "before", "after", "changes"),
    [
        ("a", "a comment", "another", False),
        ("a", "What it does.", "What it did.", False),
        ("a", "return help_me(x)", "return  (help_me(x)", None),  # no Python
        ("a", "LIMIT = 3", "LIMIT = 4", True),
        ("a", '"x": 1', '"x": 2', False),
        ("b", "return deep(x)", "return deep(x) + 1", True),
        ("c", "return x", "return -x", True),
        ("b", "return 0", "return 1", False),
        ("b", 'f"no number: {x}"', 'f"{x!r} is no number"', False),
        ("b", "InputError", "ValueError", True),
        ("b", "x is None", "not x", True),
        ("c", "def nobody", "def somebody", False),
    ],
)
def test_an_edit_counts_where_it_is_reached(tmp_path, file, before, after, changes):
    files = {"a": A, "b": B, "c": C}
    first = package(tmp_path, **files).reached(("kvrepro.a", "root"))
    files[file] = files[file].replace(before, after, 1)
    code = package(tmp_path, **files)
    if changes is None:
        with pytest.raises(SyntaxError):
            code.reached(("kvrepro.a", "root"))
    else:
        assert (code.reached(("kvrepro.a", "root")) != first) is changes


def test_what_a_module_registers_elsewhere_counts_for_all_of_it(tmp_path):
    code = package(tmp_path, a="import b\n\ndef f():\n    return 1\n\ndef g():\n    return 2\n\nb.register(g)\n")
    assert set(code.reached(("kvrepro.a", "f"))) == {("kvrepro.a", "f"), ("kvrepro.a", "g")}


def test_names_from_outside_are_told_from_local_ones():
    import ast

    names = chains(ast.parse("def f(a, *b, c=d): e = a.x + g.h.i; return [j for j in k if j] + (lambda m: m + n)(e)"))
    assert sorted(".".join(chain) for chain in names) == ["d", "g.h.i", "k", "n"]


CONDITIONS = {
    "snapkv": Condition("snapkv", 0.5, Prefill()),
    "k_norm": Condition("k_norm", 0.5, Prefill()),
    "full": Condition(),
    "shared": Condition("h2o_simple", 64, SharedCap()),
    "chunked": Condition("k_norm", 0.5, Chunked()),
}


def of_conditions() -> dict[str, str]:
    return {name: answers.code_of(condition, "torch") for name, condition in CONDITIONS.items()}


EVERY = set(CONDITIONS)


@pytest.mark.parametrize(
    ("file", "line", "whose"),
    [
        ("engine/score/keys.py", "def k_norm(", {"k_norm", "chunked"}),
        ("engine/score/keys.py", "import", set()),
        ("engine/score/window.py", "def attention(", {"snapkv"}),
        ("engine/score/window.py", "def perturbation(", set()),
        ("engine/select.py", "def select(", EVERY),
        ("engine/score/cumulative.py", "def h2o_simple(", {"shared"}),
        ("engine/signals.py", "def joined(", {"shared"}),
        ("engine/evict.py", "def _selected_for_all_layers(", {"shared"}),
        ("engine/rows.py", "def keep_held(", {"shared"}),
        ("engine/passes.py", "def _chunked(", {"chunked"}),
        ("engine/regime.py", "class SharedCap(", {"shared"}),
        ("engine/regime.py", "class Prefill(", {"snapkv", "k_norm"}),
        ("engine/regime.py", "class Regime", EVERY),
        ("chapters/leakage/prompts.py", "def prompt(", set()),
        ("experiment/measure.py", "def token_f1(", EVERY),
        ("engine/catalogue.py", "WINDOWS: dict", set()),
    ],
)
def test_an_edit_makes_the_rows_stale_that_it_decides(file, line, whose):
    assert stale(of_conditions, file, line) == whose


def test_no_policy_reaches_anothers_scorer():
    """Of every scorer of the catalogue; what all rows run reaches none."""
    scorers = {(policy.score.__module__, policy.score.__name__) for policy in CATALOGUE.values()}
    assert len(scorers) > 20
    for policy in CATALOGUE.values():
        functions = {(function.__module__, function.__name__) for function in policy.functions}
        assert scorers & set(fingerprint.PROJECT.reached(*functions)) == scorers & functions, policy.title
    for regime in (None, *(kind() for kind in REGIMES.values())):
        roots, left = answers._decided_by(Condition("k_norm", 0.5, regime) if regime else Condition(), "torch")
        assert not scorers & set(fingerprint.PROJECT.reached(*roots, apart=left["apart"]))


STUDIES = {  # computations per item: under no regime, under one that they make, under those of their parameters
    "none": (generate, {}),
    "makes": (kept.of_item, {"policies": ("k_norm",)}),
    "given": (runs.seconds, {"cells": [("lru", "", CONDITIONS["shared"]), ("k_norm", "", CONDITIONS["chunked"])]}),
}


def of_studies() -> dict[str, str]:
    """Without a model; none is computed."""
    studies = {name: PerItem("a", name, {"i": 1}, *study) for name, study in STUDIES.items()}
    return {name: PerItemPlan(study, None, Settings()).keys["i"] for name, study in studies.items()}


@pytest.mark.parametrize(
    ("file", "line", "whose"),
    [
        ("engine/passes.py", "def read(", set(STUDIES)),
        ("engine/regime.py", "class Prefill(", {"makes"}),
        ("engine/regime.py", "class Chunked(", {"given"}),
        ("engine/regime.py", "class SharedCap(", {"given"}),
        ("engine/regime.py", "class DecodeCap(", set()),
        ("engine/regime.py", "class PerStep(", set()),
        ("engine/regime.py", "class Offline(", set()),
        ("engine/passes.py", "def _chunked(", {"given"}),
        ("engine/passes.py", "def _reused(", set()),
        ("engine/signals.py", "def joined(", {"given"}),
        ("engine/score/keys.py", "def k_norm(", {"makes", "given"}),
        ("engine/score/cumulative.py", "def h2o_simple(", {"given"}),
    ],
)
def test_a_study_per_item_depends_on_the_regimes_that_it_names(file, line, whose):
    assert stale(of_studies, file, line) == whose


@pytest.mark.parametrize(
    ("reader", "read"),
    [(("kvrepro.chapters.reclamation.paged", "generate"), ("kvrepro.engine.rows", "evict_rows")),
     (("kvrepro.engine.signals", "PromptSignals"), ("kvrepro.engine.signals", "_by_position"))],
)  # fmt: skip
def test_code_of_one_regime_counts_for_a_study_that_reads_it_itself(reader, read):
    assert read in fingerprint.PROJECT.reached(reader, apart=answers.of_others([]))
    assert read not in fingerprint.PROJECT.reached(("kvrepro.engine.generate", "generate"), apart=answers.of_others([]))


def test_code_of_regimes_names_what_there_is():
    for module, name in frozenset().union(*answers.CODE_OF_REGIMES.values()):
        assert hasattr(importlib.import_module(module), name or "__name__"), (module, name)


def test_what_a_regime_runs_is_in_its_keys_and_what_it_alone_runs_in_no_others():
    """Run a small model under each regime, and see which of the engine's functions it calls, and which it alone."""
    model, text = usable(architecture("llama", 16)), prompts(70)  # compared with itself before the calls are counted
    regimes = {kind: kind() for kind in REGIMES.values() if kind is not Regime}
    called = {kind: _called(model, text, regime) for kind, regime in regimes.items()}
    functions = {(f.__module__, f.__name__) for name in POLICIES for f in CATALOGUE[name].functions}
    of_policies = set(fingerprint.PROJECT.reached(*functions))
    for kind, names in called.items():
        assert len(names) > 30
        roots, left = answers._decided_by(Condition("lru", 40, kind()), "torch")
        assert names <= of_policies | set(fingerprint.PROJECT.reached(*roots, apart=left["apart"])) | IDLE, kind
        alone = names.difference(*(others for other, others in called.items() if other is not kind)) - SEVERAL
        for other, regime in regimes.items():
            if other is not kind:
                condition = Condition("lru" if other is SharedCap else "k_norm", 40, regime)
                roots, left = answers._decided_by(condition, "torch")
                reached = fingerprint.PROJECT.reached(*roots, apart=left["apart"])
                assert not alone & set(reached), (kind, other)


SEVERAL = {("kvrepro.engine.select", "lexsort")}  # quotas and ties call it in any regime
IDLE = {("kvrepro.engine.signals", "PromptSignals")}  # made for no reduction, and asked for nothing
POLICIES = ("lru", "h2o_simple", "random_sample", "ada_kv_faithful", "k_norm", "snapkv", "h2o", "random", "cake")


def _called(model, text, regime) -> set[tuple[str, str]]:
    """(module, function) of the engine's functions that conditions of this regime call."""
    called = set()
    parameters_of.cache_clear()  # what other tests have called is called again

    def watch(frame, event, argument):
        module = frame.f_globals.get("__name__", "")
        name = frame.f_code.co_qualname.partition(".")[0]
        if event == "call" and module.startswith("kvrepro.engine.") and not name.startswith("__"):  # by `dataclass`
            called.add((module, name))

    for name in POLICIES:
        if regime.name in CATALOGUE[name].regimes:
            condition = Condition(name, 40, regime, switches=(("window", 8),) if name == "snapkv" else ())
            sys.setprofile(watch)
            try:
                generate(model, text, [condition], max_new_tokens=10, stop_ids=[])
            finally:
                sys.setprofile(None)
    return called


def test_a_study_has_the_same_keys_in_every_process():
    """What a decorated function of a chapter closes over has an address in memory, or sets in any order."""
    program = f"""
import json, sys
sys.path[:0] = {sys.path!r}
from closures import closed_over
print(json.dumps(closed_over()))
"""
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONHASHSEED": seed},
        check=True,
        capture_output=True,
        text=True,
    )
    keys, other_keys = closed_over(), json.loads(done.stdout)
    assert "kvrepro.chapters.reclamation.paged.extend" in keys
    assert {name for name in keys if keys[name] != other_keys[name]} == set()


# ---- what a reader types


def typed(source: str, name: str = "f", **more):
    """A function as if typed into a notebook: its source is known, its module is no file."""
    import linecache

    file = f"<cell {abs(hash(source))}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    space = {"__name__": "__main__", **more}
    exec(compile(source, file, "exec"), space)
    return space[name]


F = "def g(x):\n    return x * K\n\ndef f(x):\n    '''Doc.'''\n    return g(x)\n"


def test_a_typed_function_stands_for_its_helpers_and_globals():
    first = of(typed(F, K=2))
    assert of(typed(F, K=2)) == first
    assert of(typed(F.replace("Doc", "Other"), K=2)) == first
    assert of(typed(F, K=3)) != first
    assert of(typed(F.replace("x * K", "x + K"), K=2)) != first
    assert of(typed("import numpy as np\n" + F, K=np.ones(3))) != of(typed("import numpy as np\n" + F, K=np.zeros(3)))


def test_closures_defaults_and_lambdas_count():
    def closure(k):
        return lambda x, y=k: x + k + y

    assert of(closure(1)) == of(closure(1)) != of(closure(2))
    assert of(lambda x: x) != of(lambda x: x + 1)


@pytest.mark.parametrize("given", ["{}/a-queries.json", "{}/*-queries.json"])
def test_files_that_a_parameter_names_count_by_what_is_in_them(tmp_path, given, monkeypatch):
    monkeypatch.setattr(answers, "ROOT", tmp_path)
    (tmp_path / "learned").mkdir()
    (file := tmp_path / "learned" / "a-queries.json").write_text("1")
    folder = "learned" if "*" in given else file.parent
    c = Condition("tri_attention", 0.5, Prefill(), switches=(("calibration", given.format(folder)),))
    first = answers.code_of(c, "torch")
    file.write_text("2")
    assert answers.code_of(c, "torch") != first


@pytest.mark.parametrize("module", ["neighbour", "package/part", "bare/part"])
def test_a_policy_file_may_import_its_neighbour_whose_code_counts(tmp_path, module):
    keys = []
    for folder in (tmp_path / "first", tmp_path / "second"):  # with neighbours of one name
        neighbour = folder / f"{module}.py"
        neighbour.parent.mkdir(parents=True)
        if module.startswith("package"):
            (folder / "package" / "__init__.py").write_text("")
        neighbour.write_text(f"FACTOR = 2\nWHERE = {folder.name!r}\n\ndef weigh(x):\n    return FACTOR * x, WHERE\n")
        (folder / "mine.py").write_text(
            f"from {module.replace('/', '.')} import weigh\nfrom kvrepro.engine.policy import Policy\n\n\n"
            "def score(o):\n    return weigh(o.keys.float().norm(dim=-1))\n\n\nMINE = Policy('Mine', 'here', score)\n"
        )
        condition = Condition(f"{folder / 'mine.py'}:MINE", 0.5, Prefill())
        keys.append(answers.code_of(condition, "torch"))
        assert answers.code_of(condition, "torch") == keys[-1]
        neighbour.write_text(neighbour.read_text().replace("FACTOR = 2", "FACTOR = 3"))
        keys.append(answers.code_of(condition, "torch"))
        assert module.partition("/")[0] not in sys.modules
        assert str(folder) not in sys.path
    assert len(set(keys)) == 4


@pytest.mark.parametrize("line", ["from beside import FACTOR", "import beside", "from .gone import x"])
def test_what_a_function_imports_by_itself_counts(tmp_path, monkeypatch, line):
    """A notebook's folder is on the path, so that its functions may do so."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    keys = []
    for factor in (2, 2, 3):
        (tmp_path / "beside.py").write_text(f"FACTOR = {factor}\n")
        monkeypatch.delitem(sys.modules, "beside", raising=False)
        importlib.invalidate_caches()
        (tmp_path / "mine.py").write_text(f"def score(o):\n    {line}\n    return o.seen * (FACTOR or beside.FACTOR)\n")
        keys.append(of(runpy.run_path(str(tmp_path / "mine.py"))["score"]))
    assert keys[0] == keys[1]
    assert (keys[1] != keys[2]) == ("beside" in line)


def test_data_is_told_apart_and_equal_data_is_equal():
    import torch

    values = [1, 1.0, "1", True, None, [1], {"a": 1}, {"a": 2}, {1}, torch.ones(2), torch.ones(3), np.ones(2), b"1",
              Condition(), Condition("h2o", 3, Prefill()), Path("x")]  # fmt: skip
    assert len({of(value) for value in values}) == len(values)
    assert of({"a": 1, "b": 2}) == of({"b": 2, "a": 1})
    loop: list = []
    loop.append(loop)
    assert describe(loop) == ["itself"]


def test_every_version_of_python_makes_the_same_of_a_source(tmp_path):
    """Rows of a GPU machine and of a laptop meet, whichever Python each has: the workflow runs this with three."""
    (tmp_path / "a.py").write_text(
        """def other(x: "int", *rest, key=None, **more) -> str:
    'What it does.'
    value = x["a"] if x else -1.5e-7
    return f"{value!r:>{len(rest)}} it's {chr(34)}" + "a" 'b' + f'{more["c"]:{key}}' + "\\n"
""",
        encoding="utf-8",
    )
    text = Code({"kvrepro": tmp_path}).module("kvrepro.a").text("other")
    assert fingerprint.digest(text) == "c3bde98f53b8b0b7"
    lists = [package(tmp_path, b=f"X = [{prefix}'a']\n").module("kvrepro.b").text("X") for prefix in ("", "'', ")]
    assert lists[0] != lists[1]


HIDDEN = """
import functools, types
import numpy as np
import torch

def g(x):
    return x * FACTOR

@functools.cache
def cached(x):
    return x * FACTOR

class Base:
    def inherited(self, x):
        return x * FACTOR

class Kind(Base):
    @staticmethod
    def static(x):
        return x * FACTOR

    @classmethod
    def of_class(cls, x):
        return x * FACTOR

    @property
    def size(self):
        return FACTOR

@torch.no_grad()
def without_gradients(x):
    return x * FACTOR

vectorised = np.vectorize(g)
space = types.SimpleNamespace(weights=np.arange(5000) * FACTOR)
gate = torch.nn.Linear(4, 4, bias=False)
with torch.no_grad():
    gate.weight.fill_(FACTOR)
inside = lambda xs: [g(x) for x in xs]
deeper = lambda xs: map(lambda x: g(x), xs)

def f(x):
    return BODY
"""


@pytest.mark.parametrize(
    "body",
    ["cached(x)", "Kind.static(x)", "Kind.of_class(x)", "Kind().size", "Kind().inherited(x)", "without_gradients(x)",
     "vectorised(x)", "space.weights", "gate(x)", "inside(x)", "deeper(x)"],
)  # fmt: skip
def test_an_edit_counts_behind_what_libraries_wrap_around_it(body):
    source = HIDDEN.replace("BODY", body)
    first, again, edited = (of(typed(source.replace("FACTOR", str(k)))) for k in (2, 2, 3))
    assert first == again
    assert first != edited


@pytest.mark.parametrize("shape", ["aside.py", "aside/__init__.py", "aside/inner.py"])
def test_a_library_is_one_wherever_an_installer_put_it(tmp_path, monkeypatch, shape):
    module = shape.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def described(version: str) -> list[str]:
        for folder in (
            "installed/aside-1.0.dist-info",
            f"{Path('installed', shape).parent}",
            f"{Path('own', shape).parent}",
        ):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        hashes = []
        for where in ("installed", "own"):
            (tmp_path / where / shape).write_text(f"def f():\n    return {version}\n")
            for name in [name for name in sys.modules if name.partition(".")[0] == "aside"]:
                del sys.modules[name]
            linecache.clearcache()
            with monkeypatch.context() as patched:
                patched.syspath_prepend(tmp_path / where)
                patched.setattr(sys, "dont_write_bytecode", True)
                hashes.append(of(importlib.import_module(module).f))
        return hashes

    (library, own_module), (library_after, own_after) = described("1"), described("22")
    assert library == library_after
    assert own_module != own_after
