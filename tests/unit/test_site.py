"""The site has every page, and its links lead where the pages lie."""

from __future__ import annotations

import json
import re

import pytest

from tests.conftest import REPOSITORY
from tools import make_site


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "site"
    make_site.main([str(folder)])
    return folder


def test_every_page_is_in_a_menu(site):
    def pages(menu):
        return [page for one in menu for value in one.values() for page in value]

    navigation = json.loads((site / "mkdocs.yml").read_text())["nav"]
    listed = pages(navigation)
    assert len(listed) == len(set(listed))
    there = {str(path.relative_to(site / "pages")) for path in (site / "pages").rglob("*.md")}
    assert set(listed) == {page for page in there if not page.startswith("files/")}
    assert len([page for page in listed if page.startswith("plugins/")]) >= len(
        list((REPOSITORY / "plugins").glob("*/README.md"))
    )


def test_the_index_of_docs_has_the_pages_of_the_menus_in_their_order():
    index = (REPOSITORY / make_site.INDEX).read_text()
    there = {str(place): source for source, place in make_site.sources().items()}
    found = {}
    for section in index.split("\n## ")[1:]:
        links = [(REPOSITORY / "docs" / target).resolve() for _, target, _ in make_site.INDEXED.findall(section)]
        assert len(links) == section.count("\n- "), "each line is a link, a colon and a phrase"
        found[section.partition("\n")[0]] = links
    assert found == {
        title: [(REPOSITORY / there[name]) for name in names if name != "contents.md"]
        for title, names in make_site.NAVIGATION.items()
    }


def test_llms_txt_has_a_line_for_every_page_of_the_menus(site):
    text = (site / "pages/llms.txt").read_text()
    assert text.startswith("# Atropos\n\n> ")
    linked = {link.removesuffix(".html") for link in re.findall(r"^- \[.+?\]\((.+?)\): \S", text, re.M)}
    pages = {str(path.relative_to(site / "pages").with_suffix("")) for path in (site / "pages").rglob("*.md")}
    apart = {"contents", "changelog", "contributing"}
    assert linked == {page for page in pages if not page.startswith(("files/", "decisions/")) and page not in apart}


def test_links_between_pages_code_and_pictures_are_turned(site):
    first = (site / "pages/index.md").read_text()
    assert "](glossary.md)" in first and "](docs/glossary.md)" not in first
    assert "](files/docs/images/first-run.png)" in first and (site / "pages/files/docs/images/first-run.png").is_file()
    assert "```mermaid" not in first, "its script would come from elsewhere"
    assert "](files/plugins/agent_api/" in (site / "pages/agents.md").read_text()
    assert (site / "pages/files/plugins/reward_ensemble/accuracy.svg").is_file()
    assert "](../files/plugins/reward_ensemble/accuracy.svg)" in (site / "pages/plugins/reward_ensemble.md").read_text()


def test_the_reference_has_every_option_of_a_component(site):
    page = (site / "pages/reference/options.md").read_text()
    assert "## engine `hf`" in page
    assert "| `kv_cache_gb` | `8.0` | gigabytes (10⁹ bytes) for keys and values; more rows wait |" in page


def test_a_link_to_nothing_and_a_page_in_no_menu_end_it(tmp_path, monkeypatch):
    repository = tmp_path / "repository"
    (repository / "docs").mkdir(parents=True)
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        (repository / name).write_text("[gone](docs/gone.md)" if name == "README.md" else "")
    monkeypatch.setattr(make_site, "REPOSITORY", repository)
    with pytest.raises(SystemExit, match=r"README.md links to docs/gone.md"):
        make_site.main([str(tmp_path / "one")])
    (repository / "docs/gone.md").write_text("")
    monkeypatch.setattr(make_site, "NAVIGATION", {"Start": ("index.md",)})
    with pytest.raises(SystemExit, match=r"nowhere in the navigation.*gone.md"):
        make_site.main([str(tmp_path / "two")])
    with pytest.raises(SystemExit, match="is not empty"):
        make_site.main([str(repository)])
