"""Registers the strategy names with Lightning in programs that never mention this package.

torch calls :func:`autoload` at the end of ``import torch`` (entry-point group ``torch.backends``). Lightning may be
imported later, or never, so all that happens then is that a finder goes to the front of ``sys.meta_path``. It answers
for one module name only, lets the other finders find that module, and registers the names right after it has run.

The finder stays for good: a reloaded or re-imported Lightning has a new, empty registry, and taking an entry out of
``sys.meta_path`` makes an import that another thread is in the middle of skip a finder.

Nothing here may raise, import Lightning, or import a part of torch: it runs in every program that uses torch.
"""

from __future__ import annotations

import sys
from importlib import _bootstrap  # noqa: PLC2701 -- the interpreter's own; used only where it has what is asked of it

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_REGISTRY_MODULE = "lightning.pytorch.strategies"


class _RegisterAfterImport:
    """A meta path finder that registers the names whenever Lightning's registry module has been executed."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _REGISTRY_MODULE:
            return None
        # Only the finders behind this one, so that two finders of this kind cannot call each other in turn.
        finders = sys.meta_path
        behind = finders[finders.index(cls) + 1 :] if cls in finders else []
        for finder in behind:
            spec = finder.find_spec(fullname, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                _register_after_exec(spec)
                return spec
        return None


def _register_after_exec(spec: ModuleSpec) -> None:
    """Makes the spec's loader register the names after it has executed the module, once.

    The method is shadowed on the loader object rather than the loader wrapped, so that its type and everything else
    that asks it for source or resources stay as they are.
    """
    loader = spec.loader
    exec_module = getattr(loader, "exec_module", None)
    if loader is None or exec_module is None:
        return

    def exec_and_register(module: ModuleType) -> None:
        vars(loader).pop("exec_module", None)
        exec_module(module)
        _register(module)

    try:
        loader.exec_module = exec_and_register  # type: ignore[method-assign]
    except AttributeError:  # a loader without an instance dictionary: the names come with `import lightning_pardist`
        return


def _register(registry_module: ModuleType) -> None:
    """Registers the names; a failure of ours is told, and never becomes a failure of ``import lightning``."""
    try:
        from lightning_pardist.strategies.presets import register

        register(registry_module.StrategyRegistry)
    except Exception as error:
        import logging

        logging.getLogger("lightning_pardist").warning(
            "The pardist_* strategy names are not available, because registering them failed: %r", error
        )


def _wait_for_an_import_under_way() -> None:
    """Returns once no other thread is importing Lightning's registry module.

    A thread that found the module before our finder was there runs it without us, and it may be neither in
    ``sys.modules`` yet nor complete. Only the module's import lock tells; the import system's own function takes it,
    returns at once in the thread that holds it, and gives up where waiting would be a deadlock. No public name does
    the same without importing the module; on a Python without this one, the threads race.
    """
    wait = getattr(_bootstrap, "_lock_unlock_module", None)
    if wait is not None:
        wait(_REGISTRY_MODULE)


def autoload() -> None:
    """Registers the names now if Lightning's registry is there, and whenever it is imported from now on."""
    if not any(getattr(finder, "__qualname__", "") == _RegisterAfterImport.__qualname__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegisterAfterImport)
    _wait_for_an_import_under_way()
    registry_module = sys.modules.get(_REGISTRY_MODULE)
    if registry_module is not None and hasattr(registry_module, "StrategyRegistry"):
        _register(registry_module)
