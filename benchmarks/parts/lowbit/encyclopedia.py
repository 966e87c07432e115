"""Articles of Wikipedia as plain text, from the piece of a dump that gensim has for its own tests.

    PYTHONPATH=FOLDER python encyclopedia.py FOLDER OUT

FOLDER is where PACKAGES are installed. About a hundred articles, most of which begin with A; of
each the paragraphs of prose, without lists, tables, notes and headings.
"""

from __future__ import annotations

import bz2
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("gensim==4.4.0", "mwparserfromhell==0.7.2")
"""The first is only unpacked, for its data; the second reads wikitext."""
DUMP = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
SHORTEST_ARTICLE, SHORTEST_PARAGRAPH = 3000, 200  # characters
WITHOUT = ("ref", "table", "gallery", "math")
NO_PROSE = ("|", "*", "Category:", "thumb", "File:")


def pages(dump: Path) -> Iterator[tuple[str, str]]:
    """Title and wikitext of the articles that are no redirection."""
    with bz2.open(dump) as file:
        for _, page in ElementTree.iterparse(file):
            if page.tag.rpartition("}")[2] != "page":
                continue
            parts = {element.tag.rpartition("}")[2]: element.text or "" for element in page.iter()}
            if parts["ns"] == "0" and not parts["text"].lower().startswith("#redirect"):
                yield parts["title"], parts["text"]
            page.clear()


def prose(wikitext: str) -> str:
    import mwparserfromhell

    code = mwparserfromhell.parse(wikitext)
    for tag in code.filter_tags(matches=lambda tag: str(tag.tag) in WITHOUT):
        if code.contains(tag):  # not within one that is gone
            code.remove(tag)
    lines = [line.strip() for line in code.strip_code().split("\n")]
    return "\n".join(line for line in lines if len(line) >= SHORTEST_PARAGRAPH and not line.startswith(NO_PROSE))


def main() -> None:
    folder, out = map(Path, sys.argv[1:])
    found = [prose(text) for _, text in pages(folder / DUMP) if len(text) > SHORTEST_ARTICLE]
    out.write_text("\n\n".join(filter(None, found)), encoding="utf-8")


if __name__ == "__main__":
    main()
