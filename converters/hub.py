"""Checkpoints and GGUF files from a Hugging Face hub: only the files that are needed.

huggingface_hub does the downloads (token, cache, resume, progress). A failure that may pass is
tried again with growing pauses; one that will not pass is a sentence at once.

It knows repositories and file names, not what tensors mean.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from urllib.parse import urlsplit

from ..errors import ConversionError
from . import tiktoken
from .checkpoint import INDEX, SINGLE, Needs, read_json
from .repo_files import choose

if TYPE_CHECKING:
    from huggingface_hub import HfApi

__all__ = ["Hub", "Repo", "fetch_checkpoint", "parse", "pull"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_PAUSES = (1.0, 2.0, 4.0, 8.0)
"""Seconds before each further try."""
_BESIDE = (
    "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
    tiktoken.FILE, tiktoken.CODE,
)  # fmt: skip


class Repo(NamedTuple):
    """`owner/name` at a revision, None for the main one."""

    id: str
    revision: str | None = None

    @property
    def name(self) -> str:
        return self.id.rpartition("/")[2]


def parse(text: str) -> Repo | None:
    """The repository that `owner/name[@revision]` means; None if it is not one, or a path that
    exists."""
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", text)
    if match is None or match[1].startswith((".", "/")) or Path(text).exists():
        return None
    return Repo(match[1], match[2])


@dataclass(frozen=True, slots=True)
class Hub:
    """Where to ask. None takes what huggingface_hub is set up with; `pause` sleeps for seconds."""

    endpoint: str | None = None
    cache: Path | None = None
    token: str | None = None
    pause: Callable[[float], None] = time.sleep

    def files(self, repo: Repo) -> list[str]:
        """Every file of the repository."""

        def ask(api: HfApi) -> list[str]:
            _resolve(str(api.endpoint))
            return api.list_repo_files(repo.id, revision=repo.revision)

        return self._ask(repo, ask)

    def fetch(self, repo: Repo, file: str, folder: Path | None = None) -> Path:
        """The file's path in the cache, or in `folder`; downloaded as far as it is not there yet.
        Without a network, what is there already is taken as it is.

        Raises `FileNotFoundError` when the repository has no such file, and `ConversionError`.
        """

        def ask(api: HfApi) -> Path:
            offline = None
            try:
                _resolve(str(api.endpoint))
            except socket.gaierror as error:
                offline = error
            try:
                path = api.hf_hub_download(
                    repo.id,
                    file,
                    revision=repo.revision,
                    local_dir=folder,
                    cache_dir=None if folder else self.cache,
                    local_files_only=offline is not None,
                )
            except FileNotFoundError:
                if offline:
                    raise offline from None
                raise
            return Path(str(path))

        return self._ask(repo, ask, file)

    def size(self, repo: Repo, file: str) -> tuple[int, str]:
        """Bytes of a file, and the hub's stamp of its contents. Raises as `fetch`."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        def ask(api: HfApi) -> tuple[int, str]:
            _resolve(str(api.endpoint))
            url = hf_hub_url(repo.id, file, revision=repo.revision, endpoint=self.endpoint)
            found = get_hf_file_metadata(url, token=self.token)
            if found.size is None:
                raise OSError(f"the hub does not say how large {file} is")
            return found.size, str(found.etag)

        return self._ask(repo, ask, file)

    def read(self, repo: Repo, file: str, at: int, n: int) -> bytes:
        """`n` bytes of a file from byte `at` on, kept nowhere. Raises as `fetch`."""
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            hf_raise_for_status,
        )

        url = hf_hub_url(repo.id, file, revision=repo.revision, endpoint=self.endpoint)
        headers = build_hf_headers(token=self.token)
        headers |= {"Range": f"bytes={at}-{at + n - 1}", "Accept-Encoding": "identity"}

        def ask(_: HfApi) -> bytes:
            response = get_session().get(url, headers=headers, follow_redirects=True, timeout=60)
            hf_raise_for_status(response)
            if response.status_code != 206 or len(response.content) != n:
                raise OSError(
                    f"requested {n} bytes, but the hub answers {response.status_code} with "
                    f"{len(response.content)} bytes"
                )
            return bytes(response.content)

        return self._ask(repo, ask, file)

    def _ask(self, repo: Repo, what: Callable[[HfApi], _T], file: str = "") -> _T:
        from huggingface_hub import HfApi, errors

        network = errors.HTTPError  # type: ignore[attr-defined]  # of whichever httpx it uses
        api = HfApi(endpoint=self.endpoint, token=self.token)
        where = f"{repo.id}/{file}" if file else repo.id
        for wait in (*_PAUSES, None):
            try:
                return what(api)
            except errors.RepositoryNotFoundError as error:  # gated ones too
                gated = isinstance(error, errors.GatedRepoError)
                raise ConversionError(
                    f"{repo.id} is gated: accept its terms on the hub and log in (hf auth login)"
                    if gated
                    else f"{repo.id} does not exist on the hub, or needs a token (hf auth login)"
                ) from None
            except errors.RevisionNotFoundError:
                raise ConversionError(f"{repo.id} has no revision {repo.revision!r}") from None
            except errors.RemoteEntryNotFoundError:
                raise FileNotFoundError(where) from None
            except (network, OSError) as error:
                problem = _problem(error)
                if problem.lasting or wait is None:
                    tries = "" if problem.lasting else f" after {len(_PAUSES) + 1} tries"
                    raise ConversionError(
                        f"cannot fetch {where}{tries}: {problem.sentence}"
                    ) from None
                logger.warning("%s: %s; trying again in %g s", where, problem.sentence, wait)
                self.pause(wait)
        raise AssertionError  # the last turn of the loop returns or raises


class _Problem(NamedTuple):
    sentence: str
    lasting: bool


def _problem(error: BaseException) -> _Problem:
    """The first cause is what happened; later ones say what became of it."""
    if _is_offline(error):
        return _Problem("the hub's name cannot be resolved; is there a network?", True)
    while error.__cause__ is not None:
        error = error.__cause__
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        reason = {429: "too many requests", 401: "no access", 403: "no access"}.get(status)
        sentence = f"the hub answers {status}" + (f" ({reason})" if reason else "")
        return _Problem(sentence, status not in (408, 429) and status < 500)
    if isinstance(error, OSError) and error.errno is not None and error.filename:
        return _Problem(f"{error.filename}: {error.strerror}", True)  # a disk, not the network
    lines = str(error).splitlines()
    return _Problem(lines[0] if lines else type(error).__name__, False)


def _resolve(endpoint: str) -> None:
    """Raises `socket.gaierror` at once where huggingface_hub would try half a minute for a name
    that does not exist. A proxy looks names up itself."""
    address = urlsplit(endpoint)
    if address.hostname and not urllib.request.getproxies().get(address.scheme):
        socket.getaddrinfo(address.hostname, address.port or address.scheme)


def _is_offline(error: BaseException | None) -> bool:
    """Whether a name was unknown, below whatever the HTTP client made of it."""
    while error is not None:
        if isinstance(error, socket.gaierror):
            return error.errno == socket.EAI_NONAME
        error = error.__cause__ or error.__context__
    return False


def fetch_checkpoint(hub: Hub, repo: Repo, needs: Needs, with_shards: bool = True) -> Path:
    """A folder with the configuration, the tokenizer and the shards that hold what `needs` wants.

    Raises `ConversionError` when the repository is no checkpoint or cannot be reached.
    """
    try:
        config = hub.fetch(repo, "config.json")
    except FileNotFoundError:
        raise ConversionError(f"{repo.id} has no config.json, so it is not a checkpoint") from None
    try:
        index = hub.fetch(repo, INDEX)
    except FileNotFoundError:
        shards = [SINGLE]
    else:
        weight_map: Mapping[str, str] = read_json(index).get("weight_map") or {}
        values = read_json(config)
        shards = sorted({file for name, file in weight_map.items() if needs(values, name)})
    for file in _BESIDE:
        with contextlib.suppress(FileNotFoundError):
            hub.fetch(repo, file)
    for n, file in enumerate(shards if with_shards else [], 1):
        logger.info("%s: shard %d of %d, %s", repo.id, n, len(shards), file)
        try:
            hub.fetch(repo, file)
        except FileNotFoundError:
            raise ConversionError(f"{repo.id} has no {file}, which its index lists") from None
    return config.parent


def pull(hub: Hub, repo: Repo, quant: str | None, folder: Path) -> list[Path]:
    """Download a GGUF of the repository, all its shards, and its drafter's file, into `folder`.

    Returns the model's first file and the side file, if there is one. Raises `ConversionError`.
    """
    files = hub.files(repo)
    model, side = choose(files, repo.id, quant)
    paths = []
    for group in filter(None, (model, side)):
        fetched = [hub.fetch(repo, file, folder) for file in group]
        paths.append(fetched[0])
    return paths
