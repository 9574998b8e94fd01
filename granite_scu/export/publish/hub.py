"""The upload: one commit through huggingface_hub, which a second run completes where the first one failed."""

import hashlib
import io
import logging
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from ipaddress import ip_address
from typing import Any, BinaryIO, ParamSpec, TypeVar
from urllib.parse import urlsplit

from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.utils import disable_progress_bars
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from granite_scu.config.settings import TINY_MODEL
from granite_scu.errors import RunFailed, UserError
from granite_scu.export.publish.leaks import redact

AGAIN = "run the same command again: what the hub has is not uploaded twice"
PAUSES = (0.5, 1.0, 2.0)
"""Seconds before a question is asked again whose connection ended without an answer."""
UNCHANGED, STORED, UPLOADED = "there already, unchanged", "stored by an earlier attempt, not sent again", "uploaded"


_LOG = logging.getLogger(__name__)
P = ParamSpec("P")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Destination:
    """Where to.

    Attributes:
        repo_id: ``owner/name``; made when it is missing.
        revision: branch, made when it is missing; None is the main one.
        private: whether a new repository must be private; an existing public one is then refused.
    """

    repo_id: str
    revision: str | None = None
    private: bool = False


@dataclass(frozen=True)
class Uploaded:
    """What came of it.

    Attributes:
        files: for each file whether it was uploaded, stored already, or unchanged.
        url: of the repository, at its branch.
        private: whether only its owner sees it.
    """

    files: Mapping[str, str]
    url: str
    private: bool


def find_token() -> str:
    """The token of ``HF_TOKEN`` or of ``hf auth login``.

    Raises:
        UserError: neither is there.
    """
    if token := get_token():
        return token
    raise UserError("no token for the hub: log in with `hf auth login`, or set HF_TOKEN to a token that may write")


def publish(
    files: Mapping[str, bytes],
    destination: Destination,
    base: str,
    token: str,
    confirm: Callable[[str], bool],
    console: Console,
) -> Uploaded:
    """Upload in one commit what the repository lacks.

    Args:
        files: content by name.
        destination: where to.
        base: hub id of the base model, which must be there, or the embedded model's name.
        token: may write there.
        confirm: asked, with the question, before anything becomes public.
        console: for progress.

    Raises:
        UserError: the hub refuses this token, repository, base or card.
        RunFailed: the hub or the way there failed, or ``confirm`` said no; another run may complete it.
    """
    api = _PatientApi(endpoint=_endpoint(), token=token, library_name="granite-scu")
    where = f"{destination.repo_id} on {api.endpoint}"
    with _quiet(console, token):
        with _explained("asking who the token belongs to", where):
            _check_token(api.whoami())
        if base != TINY_MODEL:
            with _explained(f"looking for the base model {base}", where):
                _check_base(api, base)
        private = _make_repository(api, destination, where, confirm)
        with _explained("reading what is there already", where):
            info = api.repo_info(destination.repo_id, revision=destination.revision)
            there = _unchanged(api, destination, files)
        missing = {name: content for name, content in files.items() if name not in there}
        states = dict.fromkeys(files, UNCHANGED)
        if missing:
            with _explained("uploading", where):
                states |= _commit(api, destination, missing, info.sha, console)
    branch = f"/tree/{destination.revision}" if destination.revision else ""
    return Uploaded(states, f"{api.endpoint}/{destination.repo_id}{branch}", private)


def _asked_again(question: Callable[P, Answer]) -> Callable[P, Answer]:
    """The same question, asked again after a pause where the connection ends before the answer comes."""

    @wraps(question)
    def ask(*args: P.args, **kwargs: P.kwargs) -> Answer:
        for pause in PAUSES:
            try:
                return question(*args, **kwargs)
            except Exception as error:
                cause = _cause(error)
                if not _is_lost_connection(cause):
                    raise
                _LOG.warning("the connection failed (%s), asking again in %g s", _reason(cause), pause)
                time.sleep(pause)
        return question(*args, **kwargs)

    return ask


class _PatientApi(HfApi):
    """Asks again what changes nothing. A write is not repeated: it may have been done before the connection ended."""

    whoami = _asked_again(HfApi.whoami)
    model_info = _asked_again(HfApi.model_info)
    get_paths_info = _asked_again(HfApi.get_paths_info)


def _endpoint() -> str:
    """The hub's address, over which a token may go."""
    endpoint = os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")
    parts = urlsplit(endpoint)
    if parts.scheme != "https" and not _is_loopback(parts.hostname or ""):
        raise UserError(
            f"HF_ENDPOINT {endpoint}: is not https, so anybody on the way could read the token; name an https address"
        )
    return endpoint


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def _check_token(me: Mapping[str, Any]) -> None:
    role = ((me.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise UserError(
            f"the token of {me.get('name')} may only read; make one that may write and log in with it (`hf auth login`)"
        )


def _check_base(api: HfApi, base: str) -> None:
    try:
        api.model_info(base)
    except RepositoryNotFoundError as error:
        raise UserError(
            f"the base model {base} is not on the hub, or the token may not see it; "
            "where it was a local folder, name the same model on the hub with --base-model-id"
        ) from error


def _make_repository(api: HfApi, destination: Destination, where: str, confirm: Callable[[str], bool]) -> bool:
    """Make the repository and its branch where they are missing, after asking; returns whether it is private."""
    repo_id = destination.repo_id
    with _explained("looking for the repository", where):
        try:
            private = bool(api.repo_info(repo_id).private)
            exists = True
        except RepositoryNotFoundError:
            private, exists = destination.private, False
    if exists and destination.private and not private:
        raise UserError(
            f"--private: {where} is public already; make it private there, choose another --repo-id, or drop the flag"
        )
    if not private and not confirm(f"{where} is public: everybody can read and copy what is uploaded. Publish?"):
        raise RunFailed("not confirmed, so nothing was uploaded; --private makes a repository that only you see")
    if not exists:
        with _explained("making the repository", where):
            # None leaves the choice to the owner's settings: an organisation's default may be private.
            api.create_repo(repo_id, private=True if destination.private else None)
            private = bool(api.repo_info(repo_id).private)
    if destination.revision:
        with _explained(f"making the branch {destination.revision}", where):
            api.create_branch(repo_id, branch=destination.revision, exist_ok=True)
    return private


def _unchanged(api: HfApi, destination: Destination, files: Mapping[str, bytes]) -> set[str]:
    """The names of those that the branch holds just so."""
    found = api.get_paths_info(destination.repo_id, list(files), revision=destination.revision)
    same = set()
    for entry in found:
        content = files.get(entry.path)
        if content is None or not hasattr(entry, "blob_id"):  # a folder of that name has none
            continue
        digest = hashlib.sha256(content).hexdigest() if entry.lfs else _git_hash(content)
        if digest == (entry.lfs.sha256 if entry.lfs else entry.blob_id):
            same.add(entry.path)
    return same


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _commit(
    api: HfApi, destination: Destination, files: Mapping[str, bytes], parent: str | None, console: Console
) -> dict[str, str]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        operations = [_Upload(name, content).shown_in(progress) for name, content in files.items()]
        api.create_commit(
            destination.repo_id,
            operations,
            commit_message="Upload a LoRA adapter with granite-scu",
            revision=destination.revision,
            parent_commit=parent,
        )
    return {operation.path_in_repo: UPLOADED if operation.was_read else STORED for operation in operations}


class _Upload(CommitOperationAdd):
    """A file of a commit that shows its progress, and knows whether it was sent.

    huggingface_hub asks the large file storage first which contents it has already; those it never reads.
    """

    was_read = False
    progress: Progress | None = None

    def shown_in(self, progress: Progress) -> "_Upload":
        self.progress = progress
        return self

    @contextmanager
    def as_file(self, with_tqdm: bool = False) -> Iterator[BinaryIO]:
        self.was_read = True
        content = self.path_or_fileobj
        assert isinstance(content, bytes) and self.progress is not None
        with io.BytesIO(content) as file:
            if with_tqdm:
                yield self.progress.wrap_file(file, total=len(content), description=self.path_in_repo)
            else:
                yield file


@contextmanager
def _quiet(console: Console, token: str) -> Iterator[None]:
    """Have huggingface_hub say what it says on our console, in one line each, and upload by plain HTTP.

    Xet is left alone unless HF_HUB_DISABLE_XET=0 asks for it: an adapter is too small to gain by its chunks, and it
    cannot say which files an earlier attempt had stored.
    """
    logs = (logging.getLogger("huggingface_hub"), _LOG)
    before = [(log.handlers[:], log.level, log.propagate) for log in logs]
    xet = constants.HF_HUB_DISABLE_XET
    for log in logs:
        log.handlers[:], log.propagate = [_Lines(console, token)], False
        log.setLevel(logging.WARNING)
    constants.HF_HUB_DISABLE_XET = os.environ.get("HF_HUB_DISABLE_XET", "1").lower() not in ("0", "false", "no", "off")
    disable_progress_bars()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        constants.HF_HUB_DISABLE_XET = xet
        for log, (handlers, level, propagate) in zip(logs, before, strict=True):
            log.handlers[:], log.propagate = handlers, propagate
            log.setLevel(level)
        for warning in caught:
            if issubclass(warning.category, UserWarning):  # the hub on the card's metadata
                _say(console, str(warning.message), token)


class _Lines(logging.Handler):
    def __init__(self, console: Console, token: str) -> None:
        super().__init__(logging.WARNING)
        self.console, self.token = console, token

    def emit(self, record: logging.LogRecord) -> None:
        _say(self.console, record.getMessage(), self.token)


def _say(console: Console, words: str, token: str) -> None:
    line = " ".join(redact(words, token).split())
    console.print(f"hub: {line}", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _explained(doing: str, where: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into one line that says what to do."""
    try:
        yield
    except (UserError, RunFailed):
        raise
    except OfflineModeIsEnabled as error:
        raise UserError("HF_HUB_OFFLINE is set, so the hub cannot be asked; unset it to publish") from error
    except Exception as error:
        cause = _cause(error)
        if isinstance(cause, HfHubHTTPError):
            raise _refusal(cause, doing, where) from error
        if _is_lost_connection(cause):
            raise RunFailed(f"{doing}: the connection to {where} failed ({_reason(cause)}); {AGAIN}") from error
        if isinstance(cause, ValueError):
            raise RunFailed(f"{doing}: {where} gave an answer that cannot be used ({cause}); {AGAIN}") from error
        raise


def _is_lost_connection(cause: BaseException) -> bool:
    answered = isinstance(cause, HfHubHTTPError | OfflineModeIsEnabled)
    return isinstance(cause, HTTPError | ConnectionError | TimeoutError) and not answered


def _reason(cause: BaseException) -> str:
    return str(cause) or type(cause).__name__


def _cause(error: BaseException) -> BaseException:
    """What the hub or the network said, inside what huggingface_hub made of it."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, HTTPError):
            return found
        found = found.__cause__
    return error


def _refusal(error: HfHubHTTPError, doing: str, where: str) -> Exception:
    status = error.response.status_code
    said = " ".join((error.server_message or "no reason given").split())
    what = f"{doing}: {where} answered {status} ({said})"
    match status:
        case 401:
            return UserError(f"{what}; the token is not valid: log in again with `hf auth login`, or set HF_TOKEN")
        case 403:
            return UserError(
                f"{what}; the token may not do this: make one with write access to this owner's repositories"
            )
        case 404:
            return UserError(f"{what}; check --repo-id and --revision, and that the token may see the repository")
        case 400 | 422:
            return UserError(f"{what}; change what it names")
        case 409 | 412:
            return RunFailed(f"{what}; somebody else changed it meanwhile: {AGAIN}")
        case 429:
            return RunFailed(f"{what}; too many requests: wait {_wait(error)}, then {AGAIN}")
        case _:
            return RunFailed(f"{what}; {AGAIN}")


def _wait(error: HfHubHTTPError) -> str:
    headers = error.response.headers
    seconds = headers.get("Retry-After") or "".join(re.findall(r"\bt=(\d+)", headers.get("RateLimit", ""))[:1])
    return f"{seconds} s" if seconds.isdigit() else "some minutes"
