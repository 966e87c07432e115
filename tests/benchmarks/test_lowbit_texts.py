"""The texts of bench-lowbit: articles out of a dump, and that nothing that trains is in what judges."""

from __future__ import annotations

import bz2
from pathlib import Path

import pytest
from parts.lowbit.encyclopedia import pages, prose
from parts.lowbit.texts import require_apart

LONG = "The heron stands in shallow water for hours and moves nothing but its eyes. " * 4
DUMP = f"""<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">
<page><title>Heron</title><ns>0</ns><revision><text>{LONG}</text></revision></page>
<page><title>Ardea</title><ns>0</ns><revision><text>#REDIRECT [[Heron]]</text></revision></page>
<page><title>Talk:Heron</title><ns>1</ns><revision><text>Is it grey?</text></revision></page>
</mediawiki>"""


def test_articles_are_read_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "dump.bz2").write_bytes(bz2.compress(DUMP.encode()))
    assert list(pages(tmp_path / "dump.bz2")) == [("Heron", LONG)]


@pytest.mark.heavy
def test_prose_has_no_markup() -> None:
    """With mwparserfromhell, which the benchmark installs for itself."""
    pytest.importorskip("mwparserfromhell", reason="pip install mwparserfromhell==0.7.2, the benchmark's own")
    text = (
        f"== Habits ==\n'''{LONG.strip()}'''<ref>A note</ref> {{{{Infobox|x=1}}}}\n* a list\n[[File:Heron.jpg|thumb]]"
    )
    assert prose(text) == LONG.strip()


def test_a_text_that_shares_thirteen_words_with_the_judging_one_is_refused() -> None:
    words = [f"word{number}" for number in range(13)]
    require_apart(" ".join(words[:12]), " ".join(words))
    with pytest.raises(ValueError, match=r"1 times 13 words in a row, first 'word0 word1 .* word12', judge too"):
        require_apart("Before: " + ", ".join(words).upper() + "!", "and " + " ".join(words) + " and")
