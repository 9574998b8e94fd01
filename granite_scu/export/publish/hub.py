"""The upload: one commit through huggingface_hub, which a second run completes where the first one failed."""

import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import urlsplit

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelInfo, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.utils import disable_progress_bars
from rich.console import Console

from granite_scu.config.errors import RunFailed, UserError, one_line
from granite_scu.config.settings import TINY_MODEL
from granite_scu.export.publish import AGAIN
from granite_scu.export.publish.leaks import TOKENS_READ, redact
from granite_scu.export.publish.selection import OPTIONAL
from granite_scu.storage.run_folder import NAMED_TEMPLATES

LOOPBACK = ("localhost", "127.0.0.1", "::1")

_WRONG_REQUEST = {
    400: "change what it names",
    401: "the token is not valid: log in again with `hf auth login`, or set HF_TOKEN",
    403: "the token may not do this: make one with write access to this owner's repositories",
    404: "check --repo-id and --revision, and that the token may see the repository",
    422: "change what it names",
}
"""What to change where the hub answers with one of these. After any other error the same command may succeed."""


def find_token() -> str:
    """The token of ``HF_TOKEN`` or of ``hf auth login``.

    Raises:
        UserError: neither is there, or the file of the login cannot be read.
    """
    try:
        found, why = get_token(), ""
    except (OSError, ValueError) as error:
        found, why = None, f" ({one_line(error)})"
    if not found:
        raise UserError(
            f"no token for the hub{why}: log in with `hf auth login`, or set HF_TOKEN to one that may write"
        )
    TOKENS_READ.add(found)
    return found


def publish(
    files: Mapping[str, bytes],
    repo_id: str,
    revision: str | None,
    private: bool,
    base: str,
    token: str,
    confirm: Callable[[str], bool],
    console: Console,
) -> tuple[str, bool]:
    """Upload in one commit what the repository lacks, and remove there what is left of a former tokenizer.

    On the console huggingface_hub says what it skips.

    Args:
        files: content by name.
        repo_id: ``owner/name``; made when it is missing.
        revision: branch, made when it is missing; None means the main one.
        private: whether a new repository must be private; an existing public one is then refused.
        base: hub id of the base model, which must be there, or the embedded model's name.
        token: may write there.
        confirm: asked, with the question, before anything becomes public.
        console: for what huggingface_hub says.

    Returns:
        The address of the repository at its branch, and whether only its owner sees it.

    Raises:
        UserError: the hub refuses this token, repository, base or card.
        RunFailed: the hub or the way there failed, or ``confirm`` said no; another run may complete it.
    """
    api = HfApi(endpoint=_endpoint(), token=token, library_name="granite-scu")
    where = f"{repo_id} on {api.endpoint}"
    with _on_console(console):
        with _explain_errors("asking who the token belongs to", where):
            me = api.whoami()
        if ((me.get("auth") or {}).get("accessToken") or {}).get("role") == "read":
            raise UserError(
                f"the token of {me.get('name')} may only read; make one that may write and log in with it "
                "(`hf auth login`)"
            )
        with _explain_errors(f"looking for the base model {base}", where):
            if base != TINY_MODEL and _find(api, base) is None:
                raise UserError(
                    f"the base model {base} is not on the hub, or the token may not see it; "
                    "where it was a local folder, name the same model on the hub with --base-model-id"
                )
        private = _make_repository(api, repo_id, private, where, confirm)
        with _explain_errors("uploading", where):
            if revision:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            there = api.repo_info(repo_id, revision=revision)
            left = {file.rfilename for file in there.siblings or ()} - files.keys()
            templates = f"{NAMED_TEMPLATES}/"
            api.create_commit(
                repo_id,
                [
                    *(CommitOperationAdd(name, content) for name, content in files.items()),
                    # Of an earlier run's tokenizer: a chat template that this run has not would be taken for its own.
                    *(CommitOperationDelete(name) for name in left if name in OPTIONAL or name.startswith(templates)),
                ],
                commit_message="Upload a LoRA adapter with granite-scu",
                revision=revision,
                parent_commit=there.sha,
            )
    return f"{api.endpoint}/{repo_id}{f'/tree/{revision}' if revision else ''}", private


def _endpoint() -> str:
    """The hub's address, over which a token may go."""
    endpoint = os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")
    parts = urlsplit(endpoint)
    if parts.scheme != "https" and parts.hostname not in LOOPBACK:
        raise UserError(
            f"HF_ENDPOINT {endpoint}: is not https, so anybody on the way could read the token; name an https address"
        )
    return endpoint


def _find(api: HfApi, repo_id: str) -> ModelInfo | None:
    try:
        return api.model_info(repo_id)
    except RepositoryNotFoundError:
        return None


def _make_repository(api: HfApi, repo_id: str, private: bool, where: str, confirm: Callable[[str], bool]) -> bool:
    """Make the repository where it is missing, after asking; returns whether it is private."""
    with _explain_errors("looking for the repository", where):
        found = _find(api, repo_id)
    is_private = bool(found.private) if found else private
    if private and not is_private:
        raise UserError(
            f"--private: {where} is public already; make it private there, choose another --repo-id, or drop the flag"
        )
    if not is_private and not confirm(f"{where} is public: everybody can read and copy what is uploaded. Publish?"):
        raise RunFailed("not confirmed, so nothing was uploaded; --private makes a repository that only you see")
    if not found:
        with _explain_errors("making the repository", where):
            # None leaves the choice to the owner's settings: an organisation's default may be private.
            api.create_repo(repo_id, private=private or None)
            is_private = bool(api.repo_info(repo_id).private)
    return is_private


class _Lines(logging.Handler):
    """Prints each record in one line, without the token."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        self.say(record.getMessage())

    def say(self, words: str) -> None:
        line = " ".join(redact(words).split())
        self.console.print(f"hub: {line}", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _on_console(console: Console) -> Iterator[None]:
    """Have huggingface_hub say on our console what it repeats, skips and warns of, and upload by plain HTTP.

    Xet is left alone unless HF_HUB_DISABLE_XET=0 asks for it: an adapter is too small to gain by its chunks, and it
    cannot say which files an earlier attempt had stored.
    """
    if "HF_HUB_DISABLE_XET" not in os.environ:
        constants.HF_HUB_DISABLE_XET = True
    if not console.is_terminal:
        disable_progress_bars()
    lines, log = _Lines(console), logging.getLogger("huggingface_hub")
    before, log.handlers[:] = log.handlers[:], [lines]
    log.setLevel(logging.WARNING)
    for module in ("hf_api", "_commit_api"):  # at this level they name the files that are not sent again
        log.getChild(module).setLevel(logging.DEBUG)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)  # the hub on the card's metadata
        warnings.showwarning = lambda message, *_, **__: lines.say(str(message))
        try:
            yield
        finally:
            log.handlers[:] = before


@contextmanager
def _explain_errors(doing: str, where: str) -> Iterator[None]:
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
            raise _refusal(cause, f"{doing}: {where} answered") from error
        if isinstance(cause, HTTPError | ConnectionError | TimeoutError):
            reason = str(cause) or type(cause).__name__
            raise RunFailed(f"{doing}: the connection to {where} failed ({reason}); {AGAIN}") from error
        if isinstance(cause, ValueError):
            raise RunFailed(f"{doing}: {where} gave an answer that cannot be used ({cause}); {AGAIN}") from error
        raise


def _cause(error: BaseException) -> BaseException:
    """What the hub or the network said, inside what huggingface_hub made of it."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, HTTPError):
            return found
        found = found.__cause__
    return error


def _refusal(error: HfHubHTTPError, answered: str) -> Exception:
    status, headers = error.response.status_code, error.response.headers
    reason = " ".join((error.server_message or "no reason given").split())
    what = f"{answered} {status} ({reason})"
    if status in _WRONG_REQUEST:
        return UserError(f"{what}; {_WRONG_REQUEST[status]}")
    if status in (409, 412):
        return RunFailed(f"{what}; somebody else changed it meanwhile: {AGAIN}")
    if status == 429:
        seconds = headers.get("Retry-After") or "".join(re.findall(r"\bt=(\d+)", headers.get("RateLimit", ""))[:1])
        wait = f"{seconds} s" if seconds.isdigit() else "some minutes"
        return RunFailed(f"{what}; too many requests: wait {wait}, then {AGAIN}")
    return RunFailed(f"{what}; {AGAIN}")
