"""The user's step: from `my_train.py:make_step` or `pkg.mod:make_step` to a `UserStep`.

The file or module is imported, without a sandbox. Its function is called with the options of
`--set` and returns a step and its arguments, arrays or `jax.ShapeDtypeStruct`s:

    def make_step(batch: int = 32):
        return train_step, (abstract_state, abstract_batch)      # or (step, args, kwargs)
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from autopar.errors import AutoparError, FactoryError, near_names, shortened

_FORMS = "FILE.py:FUNCTION or MODULE:FUNCTION, such as my_train.py:make_step"
_RETURNS = "(step, args) or (step, args, kwargs): a function, a tuple and a dict of its arguments"


@dataclass(frozen=True)
class UserStep:
    step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def load_object(target: str) -> Any:
    """The object that `FILE.py:NAME` or `MODULE:NAME` names."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise FactoryError(f"{target}: needs {_FORMS}.")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    if not hasattr(module, name):
        names = [known for known in vars(module) if not known.startswith("_")]
        defined = [
            known
            for known in names
            if getattr(vars(module)[known], "__module__", "") == module.__name__
        ]
        raise FactoryError(
            f"{target}: {place} has no {name!r}{near_names(name, names)}. "
            f"It defines {', '.join(defined) or 'nothing'}."
        )
    return getattr(module, name)


def load_step(target: str, options: Mapping[str, Any]) -> UserStep:
    """Call the factory with its options."""
    factory = load_object(target)
    if not callable(factory):
        raise FactoryError(
            f"{target}: this is {shortened(factory)}; needs a function that returns {_RETURNS}."
        )
    check_options(target, factory, options)
    from autopar import _jax  # after the checks: importing JAX takes a second

    try:
        with _jax.kernels_of_absent_gpus():  # a model's shapes may be traced through its attention
            made = factory(**options)
    except Exception as error:
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        where = _raised_at(error)
        raise FactoryError(f"{target}({_options_text(options)}) raised {said}{where}") from error
    return _as_step(target, made)


def _raised_at(error: Exception) -> str:
    """The line of the user's that raised it; errors of autopar speak for themselves."""
    if isinstance(error, AutoparError):
        return ""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f", in {Path(last.filename).name}, line {last.lineno}: {last.line}"


def parse_options(given: Sequence[str]) -> dict[str, Any]:
    """From `name=value` texts; a value is JSON (16, 0.5, true, null, [1, 2]) or plain text."""
    options: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise FactoryError(f"--set {text}: needs NAME=VALUE, such as batch=32.")
        if name in options:
            raise FactoryError(f"--set {text}: {name} was set twice.")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def check_options(target: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise for options that the factory does not take, or lacks."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # builtins: the call reports it
        return
    named = {
        name: p
        for name, p in parameters.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in options:
        if name not in named and not takes_any:
            raise FactoryError(
                f"--set {name}={options[name]}: {target} has no option {name!r}"
                f"{near_names(name, named)}. It has {', '.join(named) or 'none'}."
            )
    missing = [name for name, p in named.items() if p.default is p.empty and name not in options]
    if missing:
        flags = " ".join(f"--set {name}=…" for name in missing)
        raise FactoryError(f"{target}: needs {', '.join(missing)}. Give {flags}.")


def _as_step(target: str, made: Any) -> UserStep:
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise FactoryError(f"{target} returned {_described(made)}; needs {_RETURNS}.")
    step, args, *rest = made
    if not callable(step):
        raise FactoryError(f"{target} returned {_described(step)} first; needs {_RETURNS}.")
    if not isinstance(args, (tuple, list)):
        raise FactoryError(
            f"{target} returned {_described(args)} as arguments; needs a tuple of them, "
            "such as (state, batch)."
        )
    kwargs = rest[0] if rest else {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise FactoryError(
            f"{target} returned {_described(kwargs)} as arguments by name; needs a dict."
        )
    return UserStep(step, tuple(args), dict(kwargs))


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        kinds = ", ".join(type(entry).__name__ for entry in value[:4])
        return f"a tuple of {len(value)} ({kinds}{', …' if len(value) > 4 else ''})"
    return "None" if value is None else f"{shortened(value)} ({type(value).__name__})"


def _options_text(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


# -- importing


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path()
        near = near_names(path.name, [entry.name for entry in folder.glob("*.py")])
        raise FactoryError(f"{path}: no such file{near}.")
    path = path.resolve()
    for folder in (str(path.parent), os.getcwd()):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    own, ours = path.stem, f"autopar_user_{path.stem}"
    for known in (sys.modules.get(own), sys.modules.get(ours)):
        if known is not None and getattr(known, "__file__", None) == str(path):
            return known
    name = own if own not in sys.modules else ours
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception | SystemExit):
            raise
        raise FactoryError(
            f"{path}: raised {type(error).__name__} when imported: {error}"
        ) from error
    return module


def _load_module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(missing + "."):
            raise FactoryError(
                f"{name}: no module {missing!r} in this folder or installed. For a file, give its "
                f"path: {name.replace('.', '/')}.py:…"
            ) from error
        raise FactoryError(f"{name}: imports {missing!r}, which is not installed.") from error
    except (Exception, SystemExit) as error:
        raise FactoryError(
            f"{name}: raised {type(error).__name__} when imported: {error}"
        ) from error
