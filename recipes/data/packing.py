"""Windows of one length from tokenised documents: cut from the stream, or filled with whole documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Ids = list[int]
Example = dict[str, Ids]

# Windows that wait for a document that fits. More windows waste less padding and take more time.
OPEN_WINDOWS = 64


def windows(documents: Iterable[Ids], length: int) -> Iterator[Example]:
    """Cut the concatenated documents into windows of `length` tokens; the remainder is dropped."""
    rest: Ids = []
    for ids in documents:
        rest += ids
        whole = len(rest) - len(rest) % length
        for start in range(0, whole, length):
            window = rest[start : start + length]
            yield {"input_ids": window, "labels": window}
        rest = rest[whole:]


def whole_documents(documents: Iterable[Ids], length: int, *, padding: int) -> Iterator[Example]:
    """Fill windows of `length` tokens with whole documents, each in the first that has room.

    Positions restart at each document; this tells the documents of a window apart. The first token of a document is no
    label, since the token before it belongs to another one. Longer documents are cut. The rest of a window is padding,
    as a document of its own without labels.

    Args:
        documents: Token ids of each document.
        length: Tokens per window.
        padding: Id of the padding token.
    """
    waiting: list[list[Ids]] = []
    for piece in _pieces(documents, length):
        window = next((window for window in waiting if _used(window) + len(piece) <= length), None)
        if window is None:
            window = []
            waiting.append(window)
        window.append(piece)
        if len(waiting) > OPEN_WINDOWS or _used(window) == length:
            fullest = max(waiting, key=_used)
            # By identity: equal windows are not the same one.
            waiting = [other for other in waiting if other is not fullest]
            yield _packed(fullest, length, padding)
    for window in waiting:
        yield _packed(window, length, padding)


def _pieces(documents: Iterable[Ids], length: int) -> Iterator[Ids]:
    for ids in documents:
        for start in range(0, len(ids), length):
            piece = ids[start : start + length]
            # A single token predicts nothing.
            if len(piece) > 1:
                yield piece


def _used(window: list[Ids]) -> int:
    return sum(map(len, window))


def _packed(window: list[Ids], length: int, padding: int) -> Example:
    room = length - _used(window)
    segments = [*window, [padding] * room]
    return {
        "input_ids": [token for ids in segments for token in ids],
        "labels": [label for ids in window for label in (-100, *ids[1:])] + [-100] * room,
        "position_ids": [position for ids in segments for position in range(len(ids))],
    }
