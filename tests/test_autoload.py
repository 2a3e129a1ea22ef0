"""The strategy names are known without an import, at no cost, and whatever is installed or broken."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

NAMES = [
    "pardist_ddp",
    "pardist_zero1",
    "pardist_zero2",
    "pardist_fsdp",
    "pardist_hybrid",
    "pardist_tp",
    "pardist_pp",
    "pardist_3d",
]

REGISTRY = """
class _Registry(dict):
    def register(self, name, strategy=None, description=None, override=False, **init_params):
        if name in self and not override:
            raise ValueError(name)
        self[name] = {"strategy": strategy, "init_params": init_params}
StrategyRegistry = _Registry()
"""


def python(code: str, *options: str, path: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Returns the finished run of this code in a new interpreter; it must have ended well."""
    environment = {**os.environ, **variables}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    run = subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr
    return run


def printed(code: str, *options: str, path: Path | None = None, **variables: str) -> object:
    """Returns what the code printed as JSON."""
    return json.loads(python(code, *options, path=path, **variables).stdout)


@pytest.fixture
def pretended_lightning(tmp_path: Path) -> Path:
    """A folder with a ``lightning.pytorch.strategies`` that has a registry and nothing else: starts in no time."""
    strategies = tmp_path / "lightning" / "pytorch" / "strategies"
    strategies.mkdir(parents=True)
    (tmp_path / "lightning" / "__init__.py").touch()
    (tmp_path / "lightning" / "pytorch" / "__init__.py").touch()
    (strategies / "__init__.py").write_text(REGISTRY)
    return tmp_path


def test_a_program_that_never_names_us_finds_the_names() -> None:
    found = printed("""
        import json, sys
        from lightning.pytorch.strategies import StrategyRegistry as registry
        ours = {name: registry[name]["init_params"] for name in registry if name.startswith("pardist")}
        print(json.dumps([ours, "lightning_pardist.strategies.hybrid" in sys.modules]))
    """)
    arguments = {
        "pardist_ddp": {"zero_stage": 0},
        "pardist_zero1": {"zero_stage": 1, "data_parallel_replicate_size": 1},
        "pardist_zero2": {"zero_stage": 2, "data_parallel_replicate_size": 1},
        "pardist_fsdp": {"zero_stage": 3, "data_parallel_replicate_size": 1},
        "pardist_hybrid": {"zero_stage": 3},
        "pardist_tp": {"tensor_parallel_size": "auto", "data_parallel_replicate_size": 1, "zero_stage": 3},
        "pardist_pp": {"pipeline_parallel_size": "auto"},
        "pardist_3d": {
            "pipeline_parallel_size": 2,
            "tensor_parallel_size": "auto",
            "data_parallel_replicate_size": 1,
            "zero_stage": 3,
        },
    }
    assert found == [arguments, False]


def test_the_trainer_takes_each_name() -> None:
    found = printed(f"""
        import json, lightning
        kinds = {{
            name: type(lightning.Trainer(strategy=name, accelerator="cpu", devices=1, logger=False).strategy).__name__
            for name in {NAMES}
        }}
        print(json.dumps(kinds))
    """)
    assert found == dict.fromkeys(NAMES, "HybridStrategy")


def test_torch_alone_gets_two_modules_and_no_lightning() -> None:
    code = "import json, sys, torch; print(json.dumps(sorted(sys.modules)))"
    with_us = set(printed(code))  # type: ignore[call-overload]
    without = set(printed(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0"))  # type: ignore[call-overload]
    new = {name for name in with_us - without if name.startswith(("torch", "lightning"))}
    assert new == {"lightning_pardist", "lightning_pardist._autoload"}


@pytest.mark.parametrize("order", [["lightning_pardist", "lightning"], ["lightning", "lightning_pardist"]])
def test_an_import_of_ours_does_it_where_autoload_is_off(order: list[str]) -> None:
    found = printed(
        f"""
        import importlib, json
        for name in {order}:
            importlib.import_module(name)
        from lightning.pytorch.strategies import StrategyRegistry
        print(json.dumps([name for name in StrategyRegistry if name.startswith("pardist")]))
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert found == NAMES


def test_a_spec_that_is_looked_up_and_not_loaded_changes_nothing(pretended_lightning: Path) -> None:
    found = printed(
        """
        import json, importlib.util, lightning_pardist
        spec = importlib.util.find_spec("lightning.pytorch.strategies")
        from lightning.pytorch import strategies
        # The loader is as it would be without us: its type, and nothing left on it.
        loader = strategies.__loader__
        print(json.dumps([list(strategies.StrategyRegistry), type(loader).__name__, sorted(vars(loader))]))
        """,
        path=pretended_lightning,
    )
    assert found == [NAMES, "SourceFileLoader", ["name", "path"]]


def test_a_new_registry_gets_the_names_again(pretended_lightning: Path) -> None:
    found = printed(
        """
        import importlib, json, sys
        import lightning_pardist, lightning_pardist._autoload
        counts = []
        def count():
            registry = sys.modules["lightning.pytorch.strategies"].StrategyRegistry
            counts.append([len(registry), sum("RegisterAfter" in str(finder) for finder in sys.meta_path)])
        import lightning.pytorch.strategies as strategies
        count()
        importlib.reload(strategies)
        count()
        del sys.modules["lightning.pytorch.strategies"]
        importlib.import_module("lightning.pytorch.strategies")
        count()
        importlib.reload(lightning_pardist._autoload)
        importlib.reload(lightning_pardist)
        lightning_pardist._autoload.autoload()
        importlib.reload(sys.modules["lightning.pytorch.strategies"])
        count()
        print(json.dumps(counts))
        """,
        path=pretended_lightning,
    )
    assert found == [[len(NAMES), 1]] * 4


@pytest.mark.parametrize("slow", ["find_spec", "create_module", "exec_module"])
def test_an_import_that_another_thread_is_in_the_middle_of_gets_the_names(pretended_lightning: Path, slow: str) -> None:
    """The other thread is past the place where our finder would have been asked, in each way that it can be."""
    found = printed(
        f"""
        import importlib, json, sys, threading, time
        from importlib.machinery import ModuleSpec, PathFinder
        reached = threading.Event()

        def pause_in(step):
            if step == {slow!r}:
                reached.set()
                time.sleep(0.5)

        class SlowLoader:
            def __init__(self, loader):
                self.loader = loader
            def create_module(self, spec):
                pause_in("create_module")
            def exec_module(self, module):
                pause_in("exec_module")
                self.loader.exec_module(module)

        class SlowFinder:
            @staticmethod
            def find_spec(name, path=None, target=None):
                if name == "lightning.pytorch.strategies":
                    pause_in("find_spec")
                    found = PathFinder.find_spec(name, path, target)
                    return ModuleSpec(name, SlowLoader(found.loader), origin=found.origin, is_package=True)

        sys.meta_path.insert(0, SlowFinder)
        other = threading.Thread(target=importlib.import_module, args=("lightning.pytorch.strategies",))
        other.start()
        assert reached.wait(60)
        import lightning_pardist
        print(json.dumps(list(sys.modules["lightning.pytorch.strategies"].StrategyRegistry)))
        other.join()
        """,
        path=pretended_lightning,
    )
    assert found == NAMES


def test_threads_may_import_at_once(pretended_lightning: Path) -> None:
    found = printed(
        """
        import importlib, json, sys, threading
        start, failures = threading.Barrier(16), []
        def load(name):
            start.wait()
            try:
                importlib.import_module(name)
            except Exception as error:
                failures.append(repr(error))
        names = ["lightning_pardist", "lightning.pytorch.strategies", "wave", "lightning_pardist._autoload"] * 4
        threads = [threading.Thread(target=load, args=(name,)) for name in names]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        import lightning_pardist
        print(json.dumps([failures, list(sys.modules["lightning.pytorch.strategies"].StrategyRegistry)]))
        """,
        path=pretended_lightning,
    )
    assert found == [[], NAMES]


def test_a_name_that_is_taken_stays_with_its_owner(pretended_lightning: Path) -> None:
    strategies = pretended_lightning / "lightning" / "pytorch" / "strategies" / "__init__.py"
    strategies.write_text(REGISTRY + "StrategyRegistry.register('pardist_ddp', int)\n")
    found = printed(
        """
        import json, lightning_pardist
        from lightning.pytorch.strategies import StrategyRegistry as registry
        print(json.dumps([list(registry), registry["pardist_ddp"]["strategy"] is int]))
        """,
        path=pretended_lightning,
    )
    assert found == [NAMES, True]


@pytest.mark.parametrize(
    ("broken", "outcome"),
    [
        ("raise RuntimeError('half installed')", "RuntimeError('half installed')"),
        ("import no_such_module", "ModuleNotFoundError(\"No module named 'no_such_module'\")"),
    ],
)
def test_a_broken_lightning_fails_with_its_own_error_only(pretended_lightning: Path, broken: str, outcome: str) -> None:
    strategies = pretended_lightning / "lightning" / "pytorch" / "strategies" / "__init__.py"
    strategies.write_text(broken)
    run = python(
        f"""
        import pathlib, torch, lightning_pardist
        try:
            import lightning.pytorch.strategies
        except Exception as error:
            print(repr(error))
        pathlib.Path({str(strategies)!r}).write_text({REGISTRY!r})   # mended: the next import is as the first
        import importlib; importlib.invalidate_caches()
        import lightning.pytorch.strategies as strategies
        print(len(strategies.StrategyRegistry))
        """,
        "-B",
        "-Werror",
        path=pretended_lightning,
    )
    assert run.stdout.splitlines() == [outcome, str(len(NAMES))]
    assert run.stderr == ""


@pytest.mark.parametrize(
    ("registry_module", "before", "reason"),
    [
        ("", "", "no attribute 'StrategyRegistry'"),
        (REGISTRY + "StrategyRegistry.register = None", "", "'NoneType' object is not callable"),
        (REGISTRY, "import sys; sys.modules['lightning_pardist.strategies.presets'] = None", "presets"),
    ],
    ids=["registry renamed", "registry changed", "our module broken"],
)
def test_what_keeps_us_from_registering_is_told_and_never_raised(
    pretended_lightning: Path, registry_module: str, before: str, reason: str
) -> None:
    (pretended_lightning / "lightning" / "pytorch" / "strategies" / "__init__.py").write_text(registry_module)
    run = python(
        f"import lightning_pardist\n{before}\nimport lightning.pytorch.strategies\nprint('imported')",
        "-Werror",
        path=pretended_lightning,
    )
    assert run.stdout == "imported\n"
    assert "pardist_* strategy names are not available" in run.stderr
    assert reason in run.stderr


def test_every_public_name_is_there_and_none_is_loaded_before_it_is_used() -> None:
    found = printed("""
        import json, sys, lightning_pardist
        early = [name for name in sys.modules if name in ("torch", "lightning", "lightning_pardist.strategies")]
        missing = [name for name in lightning_pardist.__all__ if getattr(lightning_pardist, name, None) is None]
        unlisted = set(lightning_pardist.__all__) - set(dir(lightning_pardist))
        print(json.dumps([early, missing, sorted(unlisted), hasattr(lightning_pardist, "no_such_name")]))
    """)
    assert found == [[], [], [], False]


def test_foreign_finders_and_loaders_do_not_break_it(pretended_lightning: Path) -> None:
    found = printed(
        """
        import json, sys, importlib.machinery
        import lightning_pardist

        class Ancient:                      # a finder without find_spec, as old packages leave behind
            find_module = staticmethod(lambda name, path=None: None)

        class Slotted:                      # a loader that takes no attributes
            __slots__ = ()
            def create_module(self, spec):
                return None
            def exec_module(self, module):
                module.StrategyRegistry = {}

        class Finder:
            @staticmethod
            def find_spec(name, path=None, target=None):
                if name == "lightning.pytorch.strategies":
                    return importlib.machinery.ModuleSpec(name, Slotted())

        sys.meta_path[1:1] = [Ancient(), Finder]
        import lightning.pytorch.strategies as strategies
        print(json.dumps(strategies.StrategyRegistry))
        """,
        path=pretended_lightning,
    )
    assert found == {}


def test_the_cost_is_below_three_milliseconds(record_property: pytest.RecordProperty) -> None:
    code = """
        import sys, time
        import torch
        from importlib.metadata import entry_points
        (entry,) = [each for each in entry_points(group="torch.backends") if each.name == "lightning_pardist"]
        start = time.perf_counter()
        entry.load()()
        print((time.perf_counter() - start) * 1000)
    """
    milliseconds = [float(python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout) for _ in range(3)]
    record_property("autoload_milliseconds", milliseconds)
    print(f"median {statistics.median(milliseconds):.2f} ms of {[f'{each:.2f}' for each in milliseconds]}")
    # The smallest of the three: a busy machine makes single runs slower, never faster.
    assert min(milliseconds) < 3
