"""The Hugging Face hub, asked in vain for seconds only: its libraries would try for a minute, or for ever."""

import functools
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from huggingface_hub import constants, get_session

log = logging.getLogger(__name__)

SECONDS = 5.0
"""Within which the hub must answer."""


@contextmanager
def asked_for(name: str) -> Iterator[None]:
    """Around what asks the hub for a model or a data set. Where it cannot be reached only the hub's cache is looked at.

    Args:
        name: on the hub.
    """
    before = constants.HF_HUB_OFFLINE
    if not before:
        _announce(name)
        constants.HF_HUB_OFFLINE = not _answers(constants.ENDPOINT)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@functools.cache
def _announce(name: str) -> None:
    log.info("looking up %s on the Hugging Face hub", name)


@functools.cache
def _answers(endpoint: str) -> bool:
    answered = threading.Event()

    def ask() -> None:
        with suppress(Exception):  # httpx's or httpx2's own, by the version of huggingface_hub
            get_session().head(endpoint, timeout=SECONDS)
            answered.set()

    # In a thread, for the timeout of a connection does not hold for the name server.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return answered.is_set()
