"""Whether the Hugging Face Hub answers, found out before a library retries for half a minute."""

import os
from threading import Thread

from rankwise.errors import InputError


def hub_reachable(timeout: float = 5.0) -> bool:
    """Ask the Hub once, without retries.

    True as well where ``HF_HUB_OFFLINE`` is set: then nothing is asked of the network and the libraries read
    their caches at once. Cost: one HEAD request, ``timeout`` seconds at most, name look-up included.

    Args:
        timeout: seconds to wait for an answer of any status.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return True
    answers: list[int] = []
    # A name look-up knows no timeout, so the wait is for the thread and not for the request.
    asking = Thread(target=_ask, args=(constants.ENDPOINT, timeout, answers), daemon=True)
    asking.start()
    asking.join(timeout)
    return bool(answers)


def _ask(endpoint: str, timeout: float, answers: list[int]) -> None:
    from huggingface_hub import get_session

    try:
        answers.append(get_session().head(endpoint, timeout=timeout).status_code)
    except Exception:  # whatever the HTTP library of the day calls it, there was no answer
        return


def need_hub(name: str, *, expected: str, fix: str) -> None:
    """Refuse a name that only the Hub can resolve where the Hub does not answer.

    Args:
        name: model or data set, as the user gave it.
        expected: what would have done, such as ``"a local file or folder, or the Hugging Face Hub"``.
        fix: what works without a network.

    Raises:
        InputError: if the Hub does not answer.
    """
    if hub_reachable():
        return
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    raise InputError(
        name,
        expected=expected,
        got=f"no such file or folder, and no answer from {endpoint}",
        fix=f"{fix} What has been downloaded before is read with HF_HUB_OFFLINE=1 in the environment.",
    )
