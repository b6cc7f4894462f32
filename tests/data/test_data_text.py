import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.data import load_text, read_rows, read_text
from rankwise.errors import InputError


def write(folder: Path, content: bytes, name: str = "text.txt") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@given(text=st.text(min_size=1).filter(lambda text: text.strip() and not text.startswith("\ufeff")))
def test_text_comes_back_as_written(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = write(tmp_path_factory.mktemp("texts"), text.encode("utf-8"))
    assert read_text(path) == text == load_text(path)


def test_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    assert read_text(write(tmp_path, b"\xef\xbb\xbfabc")) == "abc"


def test_line_endings_are_kept(tmp_path: Path) -> None:
    assert read_text(write(tmp_path, b"a\r\nb\n")) == "a\r\nb\n"


@pytest.mark.parametrize("read", [read_text, read_rows, load_text])
def test_missing_file(read, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no\.txt: expected a text file, got no such file\. Check the path"):
        read(tmp_path / "no.txt")


@pytest.mark.parametrize("read", [read_text, read_rows])
def test_folder(read, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected a text file, got a folder\. Name one file in it\.$"):
        read(tmp_path)


def test_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:  # root may read everything, so permissions alone do not show it
        raise PermissionError(13, "Permission denied", str(path))

    path = write(tmp_path, b"abc")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(InputError, match=r"got a file you may not read\. Change its permissions"):
        read_text(path)


def test_broken_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(InputError, match=r"Input/output error\. Check the path and the disk"):
        read_text(tmp_path / "text.txt")


@pytest.mark.parametrize("content", [b"", b" \n\t\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_empty_text(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected some text, got an empty file"):
        read_text(write(tmp_path, content))


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"caf\xe9", "byte 0xE9 at offset 3 (line 1)"),
        (b"one\ntwo\n\xff", "byte 0xFF at offset 8 (line 3)"),
        (b"\xef\xbb\xbfab\xff", "byte 0xFF at offset 5 (line 1)"),
    ],
)
def test_first_byte_that_is_not_utf8_is_named(content: bytes, place: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_text(write(tmp_path, content, "a b.txt"))
    assert place in str(caught.value)
    assert f"iconv -f LATIN1 -t UTF-8 '{tmp_path}/a b.txt'" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "fix"),
    [("héllo".encode("utf-16"), "iconv -f UTF-16 -t UTF-8"), (gzip.compress(b"abc", mtime=0), "gunzip -k")],
)
def test_other_encodings_are_recognised(content: bytes, fix: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=fix):
        read_text(write(tmp_path, content))


ROWS = b'{"text": "one", "id": 1}\n\n{"text": "two \\u00e9"}\n'


@pytest.mark.parametrize(
    ("name", "content"), [("r.jsonl", ROWS), ("R.JSONL.GZ", gzip.compress(ROWS, mtime=0))]
)
def test_rows_come_in_order_without_blank_lines(name: str, content: bytes, tmp_path: Path) -> None:
    assert load_text(write(tmp_path, content, name)) == ["one", "two é"]


def test_rows_of_another_column(tmp_path: Path) -> None:
    assert load_text(write(tmp_path, b'{"body": "one"}', "r.jsonl"), column="body") == ["one"]


def test_line_separators_inside_a_text_do_not_end_its_row(tmp_path: Path) -> None:
    path = write(tmp_path, '{"text": "a\u2028b\x85c"}\n'.encode(), "r.jsonl")
    assert load_text(path) == ["a\u2028b\x85c"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": ', r"r\.jsonl, line 2: expected a JSON object.*got no JSON"),
        (b'"a"', r"line 1: expected a JSON object such as .*, got type str\. Write one object a line"),
        (b'{"txt": "a"}', r"expected a field 'text', got the fields 'txt'\. Did you mean txt\?"),
        (b"{}", r"got the fields none\. Write the text under 'text'"),
        (b'{"text": 7}', r"expected text, got type int in 'text'"),
        (b'{"text": "a", "more": ' + b"[" * 100_000, r"line 1: .*no JSON .*nested too deeply"),
        (b'{"text": "a", "more": ' + b"9" * 5000 + b"}", r"line 1: expected a JSON object.*got no JSON"),
        (b'{"text": "\\ud800"}', r"line 1: expected a JSON object.*got no JSON"),
        (b"\n\n", r"expected JSON objects, one a line, got an empty file"),
        (b'{"text": "\xff"}', r"byte 0xFF at offset 10"),
        (gzip.compress(ROWS, mtime=0)[:-9], r"expected a whole gzip file, got a broken one"),
    ],
)
def test_rows_that_cannot_be_read(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read_rows(write(tmp_path, content, "r.jsonl"))
