"""Worker text made harmless for a terminal: what is left moves no cursor, sets no title and clears no screen."""

from __future__ import annotations

import re

_SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor, erase
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"  # OSC, DCS and kin, with their string
    r"|\x1b[ -/]*[0-~]"  # the two-letter ones; also the head of a string that never ends, whose text stays
)
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")
_SURROGATES = re.compile("[\ud800-\udfff]")
_ANY = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def clean_line(text: str) -> str:
    """`text` as one line: control sequences and control characters gone, tabs kept. Linear in its length."""
    if not _ANY.search(text):
        return text
    return _SURROGATES.sub("\N{REPLACEMENT CHARACTER}", _CONTROLS.sub("", _SEQUENCES.sub("", text)))


def clean_lines(text: str) -> list[str]:
    """The lines of `text`, each of them cleaned, without empty ones at either end."""
    return [clean_line(line) for line in text.strip("\r\n").split("\n")] if text.strip() else []
