"""Pages as HTML files: complete, escaped, and independent of the network."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.support import documents, records
from tests.support.documents import audit_document, page_text
from tests.support.records import DRAWN, HEAD_MEASURES

from rankwise.errors import InputError
from rankwise.report import document_text, write_page


class Page(HTMLParser):
    """Tags with their attributes, the text by tag, and the whole of the scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


@pytest.fixture(scope="module", params=[*documents.DOCUMENTS, *(f"{name}, audit" for name in records.ALL)])
def page(request: pytest.FixtureRequest) -> Page:
    if request.param in documents.DOCUMENTS:
        return Page(page_text(documents.DOCUMENTS[request.param]()))
    return Page(documents.page(records.ALL[request.param.removesuffix(", audit")]()))


def test_every_page_has_its_data_plotly_and_our_script_once_or_no_script(page: Page) -> None:
    """The policy allows these scripts and the favicon, and nothing else."""
    kinds = [attrs.get("type") for tag, attrs in page.tags if tag == "script"]
    drawn = [attrs for _, attrs in page.tags if "plot" in (attrs.get("class") or "").split()]
    assert kinds == (["application/json", None, "module"] if drawn else [])
    assert sum("* plotly.js (cartesian" in script for script in page.scripts) == bool(drawn)
    if drawn:
        json.loads(page.scripts[0], parse_constant=_no_constant)
    (policy,) = (
        attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in page.scripts[1:]]
    assert re.findall(r"'sha256-([^']+)'", policy) == digests
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert "unsafe" not in rules["script-src"]
    assert "data:" in rules["img-src"]
    assert [attrs["href"] for tag, attrs in page.tags if tag == "link"] == ["data:,"]


def test_a_page_loads_no_other_file_and_its_links_have_targets(page: Page) -> None:
    asking = {"src", "srcset", "action", "data", "poster", "background", "formaction"}
    links = [attrs["href"] for _, attrs in page.tags if "href" in attrs]
    assert all(link.startswith("#") or link == "data:," for link in links)
    assert not [tag for tag, attrs in page.tags if asking & attrs.keys()]
    assert not [tag for tag, attrs in page.tags if any(name.startswith("on") for name in attrs)]
    ends = [attrs["id"] for _, attrs in page.tags if attrs.get("id")]
    assert len(ends) == len(set(ends))
    assert {attrs["href"][1:] for tag, attrs in page.tags if tag == "a"} <= set(ends)


@pytest.mark.parametrize("kind", documents.DOCUMENTS)
def test_names_are_text_and_numbers_that_are_not_finite_are_signs(kind: str) -> None:
    document = documents.DOCUMENTS[kind]()
    text = page_text(document)
    assert text == page_text(documents.DOCUMENTS[kind]())
    page = Page(text)
    assert not [tag for tag, _ in page.tags if tag in {"img", "bold", "b-x"}]
    assert records.NASTY in page.text
    assert records.NASTY not in text
    assert "<!--<script>" not in text
    assert not [script for script in page.scripts[:1] if "<" in script]
    assert not re.search(r"(?<!sample/)\bnan\b", page.text, re.IGNORECASE)
    assert "\x1b" not in document_text(document)
    assert not re.search(r"(?<!sample/)\bnan\b", document_text(document), re.IGNORECASE)


def test_names_are_literal_in_the_texts_that_plotly_reads_as_html() -> None:
    figures = json.loads(Page(documents.page(records.nasty())).scripts[0])["figures"]
    assert all("&lt;img" in text for text in figures[0]["data"][2]["hovertext"])
    texts = [text for figure in figures for trace in figure["data"] for text in trace.get("hovertext") or []]
    assert not [text for text in texts if "<img" in text]


def test_missing_numbers_are_null() -> None:
    text = documents.page(records.only_nan())
    data = json.loads(Page(text).scripts[0])
    assert {value for column in data["columns"] for value in column["values"]} == {None}
    assert not re.search(r"(?<!sample/)\bnan\b", Page(text).text, re.IGNORECASE)
    # gaps in the curves of states
    assert [set(trace["y"]) for figure in data["figures"] for trace in figure["data"]] == [{None}] * 3 * len(
        DRAWN
    )


def test_only_an_incomplete_audit_has_a_banner_and_the_provenance_is_complete() -> None:
    text, about = Page(documents.page(records.encoder())).text, records.encoder().provenance
    assert "Incomplete." in Page(documents.page(records.empty())).text
    assert "Incomplete." not in text
    facts = (about.model, about.revision, about.command, about.notes[0], "bfloat16", "torch 2.13.0", "0.01")
    assert all(fact in text for fact in facts)


def test_every_finding_is_on_the_page_with_a_link() -> None:
    audit = records.sized(12, 24)
    page = Page(documents.page(audit))
    links = {attrs["data-finding"]: attrs["href"] for _, attrs in page.tags if "data-finding" in attrs}
    assert set(links) == {str(index) for index in range(len(audit.findings))}
    assert set(links.values()) == {"#grid-0"}
    ids = [attrs["id"] for _, attrs in page.tags if attrs.get("id", "").startswith("finding-")]
    assert sorted(ids) == sorted(f"finding-{index}" for index in range(len(audit.findings)))
    assert page.text.count("SINK") == 1


def test_a_page_is_one_complete_file_in_a_new_or_existing_folder(tmp_path: Path) -> None:
    path = write_page(audit_document(records.encoder()), tmp_path / "deep" / "report.html")
    assert path.read_text(encoding="utf-8").endswith("</html>")
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]
    assert write_page(audit_document(records.empty()), tmp_path) == tmp_path / "index.html"
    (tmp_path / "taken").write_text("a file, not a folder")
    with pytest.raises(InputError, match=r"page .*taken/report\.html.* Choose a folder"):
        write_page(audit_document(records.empty()), tmp_path / "taken" / "report.html")


def test_findings_and_map_count_the_same_heads() -> None:
    audit = records.encoder()
    where = records.place(4, 2)
    below = records.finding("OVERSIZED_HEADS", "info", where=where, evidence={"heads": 3.0})
    below = below.model_copy(update={"heads": [2, 5, 7]})
    audit = audit.model_copy(update={"findings": [below]})
    data = json.loads(Page(documents.page(audit)).scripts[0])
    assert sorted(data["targets"][0]["heads"]) == [50, 53, 55]
    assert sum(len(sign["x"]) for grid in data["grids"] for sign in grid["signs"]) == 3


def test_the_title_is_a_name_and_the_provenance_has_the_path() -> None:
    audit = records.encoder()
    about = audit.provenance.model_copy(update={"model": "/home/me/runs/my-bert/checkpoint-20"})
    page = Page(documents.page(audit.model_copy(update={"provenance": about})))
    assert "/home/me/runs/my-bert/checkpoint-20" in page.text
    assert "my-bert/checkpoint-20 · rankwise audit" in re.sub(r"\s+", " ", page.text)


def test_nothing_on_the_page_judges_a_rank() -> None:
    audit = records.encoder()
    page = Page(documents.page(audit.model_copy(update={"findings": []}))).text
    measures = " ".join(f"{measure.meaning} {measure.low} {measure.high}" for measure in HEAD_MEASURES)
    judging = ("worr", "chance", " bad", "good", "orange")
    assert not [word for word in judging if word in f"{page} {measures}".lower()]
