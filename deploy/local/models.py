"""Where models lie on this machine: a directory stays itself, a built-in is prepared once into the user's cache."""

from collections.abc import Callable
from pathlib import Path

from core.errors import ConfigError
from engine.models.builtin import BUILTIN_NAMES, prepare_builtin


def cache_directory() -> Path:
    """Return the user's model cache."""
    return Path.home() / ".cache" / "tandem" / "models"


def model_directory(model: str, cache: Path, report: Callable[[str], None]) -> Path:
    """Return the directory of a built-in or of a path; ConfigError with what to do otherwise."""
    if model in BUILTIN_NAMES:
        report(f"preparing {model} (once; later starts take it from {cache})")
        return prepare_builtin(model, cache)
    path = Path(model).expanduser().resolve()
    if not (path / "config.json").is_file():
        known = ", ".join(BUILTIN_NAMES)
        raise ConfigError(f"{model!r} is neither a built-in model ({known}) nor a directory with a config.json")
    return path
