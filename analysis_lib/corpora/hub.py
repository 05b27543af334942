"""Files of the Hugging Face hub: from the local cache, else downloaded at a revision."""

import logging
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import huggingface_hub
from huggingface_hub import constants

from analysis_lib.errors import AnalysisError
from analysis_lib.progress import is_log

# Files of a model; pickled weights are downloaded only for pinned models that have no others.
MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
# Files from which only tensors are read.
PICKLES = ("pytorch_model.bin", "pytorch_model-*-of-*.bin", "pytorch_model.bin.index.json")


def model_folder(repository: str, revision: str | None = None, pickled: bool = False) -> Path:
    """The folder of a model's snapshot, downloaded if it is not in the cache.

    Args:
        pickled: whether to download ``pytorch_model.bin`` if the model has no safetensors.

    Raises:
        AnalysisError: the hub does not have the model, or it cannot be reached and the model is not
            in the cache.
    """
    snapshot = partial(
        _fetch,
        repository,
        huggingface_hub.snapshot_download,
        revision=revision,
        ignore_patterns=["*/*"],
    )
    folder = snapshot(allow_patterns=[*MODEL_FILES])
    if pickled and not list(folder.glob("*.safetensors")):
        folder = snapshot(allow_patterns=[*MODEL_FILES, *PICKLES])
    return folder


def dataset_file(repository: str, revision: str, file: str) -> Path:
    """One file of a dataset, downloaded if it is not in the cache."""
    download = huggingface_hub.hf_hub_download
    return _fetch(repository, download, filename=file, revision=revision, repo_type="dataset")


def require(repository: str, revision: str | None, *files: str, repo_type: str = "model") -> str:
    """The commit of the first of these files that is cached, else the requested revision.

    Nothing is downloaded.

    Raises:
        AnalysisError: no file is in the cache and the hub cannot be reached.
    """
    from huggingface_hub.errors import HFValidationError

    for file in files:
        try:
            cached = huggingface_hub.try_to_load_from_cache(
                repository, file, revision=revision, repo_type=repo_type
            )
        except HFValidationError as error:
            raise _misnamed(repository) from error
        if isinstance(cached, str):
            # .../snapshots/COMMIT/FILE
            return Path(cached).parents[file.count("/")].name
    if not _reachable():
        raise _unreachable(repository, "cannot be reached")
    return revision or "main"


def _fetch(repository: str, download: Callable[..., str], **arguments) -> Path:
    # Imported here, since its import takes time that other corpora need not wait for.
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError

    # The hub's client retries with a page of warnings; one clear line is raised below instead.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if is_log(sys.stderr):
        # A bar would be one line of carriage returns.
        huggingface_hub.utils.disable_progress_bars()
    offline = not _reachable()
    try:
        return Path(download(repository, local_files_only=offline, **arguments))
    except HFValidationError as error:
        raise _misnamed(repository) from error
    except GatedRepoError as error:
        raise AnalysisError(
            f"{repository} is gated: ask for access on its page on the hub, log in with `hf auth "
            "login` and run again"
        ) from error
    except HfHubHTTPError as error:
        raise AnalysisError(
            f"the hub refused {repository}: {str(error).splitlines()[0]}"
        ) from error
    except OSError as error:
        # The hub's own "not in the cache" error is an OSError, too.
        reason = "cannot be reached" if offline else f"failed ({type(error).__name__})"
        raise _unreachable(repository, reason) from error
    except Exception as error:  # Errors of the HTTP client, such as for an invalid proxy.
        raise _unreachable(
            repository, f"cannot be asked ({type(error).__name__}: {error})"
        ) from error


def _misnamed(repository: str) -> AnalysisError:
    return AnalysisError(f"{repository} is not a name on the hub: it should read owner/name")


def _unreachable(repository: str, reason: str) -> AnalysisError:
    return AnalysisError(
        f"{repository} is not in the local cache and the hub {reason}: connect once and run again, "
        "or give a local folder or file"
    )


def _reachable() -> bool:
    """Whether the hub answers: its client would retry for half a minute before giving up."""
    if constants.HF_HUB_OFFLINE:
        return False
    if any(
        os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    ):
        return True
    endpoint = urlsplit(constants.ENDPOINT)
    port = endpoint.port or (443 if endpoint.scheme == "https" else 80)
    try:
        with socket.create_connection((endpoint.hostname, port), timeout=5):
            return True
    except OSError:
        return False
