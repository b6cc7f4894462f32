import subprocess
import sys
from threading import Event
from types import SimpleNamespace

import huggingface_hub
import pytest

from rankwise.data import hub_reachable
from rankwise.data.hub import need_hub
from rankwise.errors import InputError


class Session:
    """Stands in for the HTTP session of huggingface_hub."""

    def __init__(self, head) -> None:
        self.head = head


def answer_with(head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: Session(head))


@pytest.mark.parametrize("status", [200, 404, 503])
def test_any_answer_is_an_answer(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(lambda *_, **__: SimpleNamespace(status_code=status), monkeypatch)
    assert hub_reachable()


def test_one_question_with_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, float]] = []

    def refuse(url: str, timeout: float) -> None:
        asked.append((url, timeout))
        raise OSError("Name or service not known")

    answer_with(refuse, monkeypatch)
    assert not hub_reachable(timeout=3.0)
    assert asked == [(huggingface_hub.constants.ENDPOINT, 3)]


def test_a_name_server_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    never = Event()
    answer_with(lambda *_, **__: never.wait(), monkeypatch)
    assert not hub_reachable(timeout=0.05)  # returning at all is what is tested
    never.set()


def test_offline_mode_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(lambda *_, **__: pytest.fail("asked"), monkeypatch)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert hub_reachable()


def test_need_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(lambda *_, **__: SimpleNamespace(status_code=200), monkeypatch)
    need_hub("gpt2", expected="a model", fix="Give a folder.")
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: None)
    with pytest.raises(
        InputError, match=r"gpt2: expected a model, got no such file.*Give a folder\..*HF_HUB_OFFLINE=1"
    ):
        need_hub("gpt2", expected="a model", fix="Give a folder.")


def test_importing_the_loaders_is_light() -> None:
    heavy = "{'transformers', 'datasets', 'PIL', 'huggingface_hub', 'pandas'}"
    code = f"import sys, rankwise.data; sys.exit(' '.join({heavy} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
