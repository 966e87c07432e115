"""From characters that people marked in an answer to the tokens that carry them.

Label Studio has counted characters in two ways, code points and UTF-16 units, which differ behind an emoji. So the
marked text decides which was meant, and a span that fits neither is refused.
"""

from __future__ import annotations

from bisect import bisect_right

from reflux.components.ingest_labels.known_traces import KnownTrace
from reflux.components.records import shown


def token_positions(trace: KnownTrace, start: int, end: int, marked_text: str | None) -> list[int]:
    """Tokens with at least one marked character that is not white space. [] where the answer is still to be given.

    ValueError for a span that is empty, lies outside the response, or does not read as `marked_text`.
    """
    if not 0 <= start < end:
        raise ValueError(f"start {start}, end {end}: must be characters of the response with 0 <= start < end")
    if trace.response is None or trace.token_ends is None:
        return []
    text = trace.response
    for begin, stop in ((start, end), _from_utf16(text, start, end)):
        if stop <= len(text) and (marked_text is None or text[begin:stop] == marked_text):
            break
    else:
        if marked_text is None:
            raise ValueError(f"end {end}: the response has {len(text)} characters")
        raise ValueError(f"marked_text {shown(marked_text)}: the response has {shown(text[start:end])} there")
    first, last = bisect_right(trace.token_ends, begin), bisect_right(trace.token_ends, stop - 1)
    positions = []
    for token in range(first, last + 1):
        token_begin = trace.token_ends[token - 1] if token else 0
        if text[max(begin, token_begin) : min(stop, trace.token_ends[token])].strip():
            positions.append(token)
    if not positions:
        raise ValueError(f"start {start}, end {end}: only white space is marked")
    return positions


def _from_utf16(text: str, start: int, end: int) -> tuple[int, int]:
    """The same span in code points, taking the numbers for UTF-16 units; beyond the text where they cut a character."""
    units = text.encode("utf-16-le", "surrogatepass")
    try:
        begin, stop = (len(units[: 2 * offset].decode("utf-16-le")) for offset in (start, end))
    except UnicodeDecodeError:
        return len(text), len(text) + 1
    return (begin, stop) if 2 * end <= len(units) else (len(text), len(text) + 1)
