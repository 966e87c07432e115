"""The files that annotation tools leave: what `records` reads, and beside it JSON documents.

Which tool wrote a file is not asked here; see `formats`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from reflux.components.record_files import DAMAGE, Part, parts
from reflux.components.record_formats import FORMATS, KEPT_CHARACTERS, Row, json_lines
from reflux.components.records import Record

MAX_DOCUMENT_BYTES = 2**28
"""A document has to be parsed as a whole; what is larger can be exported in parts or as JSON lines."""


def read_exports(path: Path) -> Iterator[Record]:
    """Every record of a file, an archive, or a folder of both. ValueError names a file that cannot be read at all."""
    for part in parts(path, (*FORMATS, ".json")):
        read = json_document if part.kind == ".json" else FORMATS[part.kind]
        try:
            for row in read(part):
                yield Record(source=part.name, row=row.number, text=row.text, values=row.values, problem=row.problem)
        except DAMAGE as error:
            raise ValueError(f"{part.name}: cannot be read to its end ({error})") from error


def json_document(part: Part) -> Iterator[Row]:
    """One row per element of an array, counted from 1, or the one object; tools also call JSON lines .json."""
    content = part.stream.read(MAX_DOCUMENT_BYTES + 1)
    if len(content) > MAX_DOCUMENT_BYTES:
        raise ValueError(f"{part.name}: a JSON document of more than {MAX_DOCUMENT_BYTES:,} bytes; export it in parts")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{part.name}: not UTF-8 (byte {error.start}); save it as UTF-8") from None
    if not text.strip():
        return
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # a whole value, and then more: one per line
            yield from json_lines(replace(part, stream=io.BytesIO(content), limit_bytes=len(content)))
            return
        raise ValueError(f"{part.name}, line {error.lineno}: not JSON ({error.msg})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{part.name}: not usable JSON ({error})") from None
    for number, element in enumerate(document if isinstance(document, list) else [document], start=1):
        yield _row(number, element)


def _row(number: int, element: Any) -> Row:
    try:
        text = json.dumps(element, ensure_ascii=False)
        text.encode()  # an escaped lone surrogate parses, but is not text
    except (ValueError, RecursionError) as error:
        return Row(number=number, text="", problem=f"not a usable JSON object: {error}")
    if not isinstance(element, dict):
        return Row(
            number=number, text=text[:KEPT_CHARACTERS], problem=f"not a JSON object but a {type(element).__name__}"
        )
    return Row(number=number, text=text[:KEPT_CHARACTERS], values=element)
