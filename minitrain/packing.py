"""Lay documents out in rows: cut, truncate, put one or several into a row.

A dataset takes rows from the two classes here: each has num_rows, the counts for the summary, and
fill(row, ids_S, labels_S, starts_S), which writes one row into a batch; starts_S marks where a
document, or the padding, begins.

S tokens of a row.
"""

import numpy as np

from minitrain.documents import IGNORE, Documents

WINDOW_ROWS = 64  # packing looks at the documents of about so many rows at once
SCAN_TOKENS = 1 << 24  # tokens of a token file looked at at once


class TokenStream:
    """Cut all-loss tokens into consecutive rows.

    Where documents end is read from the eos ids in a row, when it is asked for: there is no index,
    so that a memory-mapped file larger than memory costs none.
    """

    def __init__(self, tokens: np.ndarray, eos_id: int | None, seq_len: int, num_documents):
        self.tokens, self.seq_len = tokens, seq_len
        self.eos_id = -1 if eos_id is None else eos_id
        self.num_rows = -(-len(tokens) // seq_len)
        self.num_documents, self.num_tokens = num_documents, len(tokens)
        # Neither a row's nor a document's first token is predicted. Documents that begin with a
        # row count once; finding them in a file would mean to read all of it.
        self.exact = not isinstance(tokens, np.memmap)
        borders = max(0, (num_documents or 1) - 1)
        if self.exact:
            borders -= int((tokens[seq_len - 1 : -1 : seq_len] == self.eos_id).sum())
        self.num_loss_tokens = max(0, len(tokens) - self.num_rows - borders)

    def fill(self, row: int, ids_S: np.ndarray, labels_S: np.ndarray, starts_S: np.ndarray):
        piece = self.tokens[row * self.seq_len : (row + 1) * self.seq_len]
        end = len(piece)
        ids_S[:end] = labels_S[:end] = piece
        starts_S[1:end] = piece[:-1] == self.eos_id
        starts_S[end : end + 1] = True


class DocumentRows:
    """Put pieces of documents, each no longer than a row, into rows.

    tokens, labels   of all documents, end to end; labels None: every token counts
    begins, lengths  where each piece is in them
    row_of_piece     the row that each piece goes to
    """

    exact = True

    def __init__(self, tokens, labels, begins, lengths, row_of_piece, num_documents):
        self.tokens, self.begins, self.lengths = tokens, begins, lengths
        self.labels = tokens if labels is None else labels
        self.order = np.argsort(row_of_piece, kind="stable")  # pieces, row by row
        self.num_rows = int(row_of_piece.max(initial=-1)) + 1
        self.first = np.searchsorted(row_of_piece[self.order], np.arange(self.num_rows + 1))
        self.num_documents, self.num_tokens = num_documents, int(lengths.sum())
        self.num_loss_tokens = int(_count_loss(labels, begins, lengths).sum())

    def fill(self, row: int, ids_S: np.ndarray, labels_S: np.ndarray, starts_S: np.ndarray):
        at = 0
        for piece in self.order[self.first[row] : self.first[row + 1]]:
            begin, length = self.begins[piece], self.lengths[piece]
            ids_S[at : at + length] = self.tokens[begin : begin + length]
            labels_S[at : at + length] = self.labels[begin : begin + length]
            starts_S[at] = True
            at += length
        starts_S[at : at + 1] = True


def lay_out(documents: Documents, seq_len: int, pack: bool, eos_id: int | None, notes: list[str]):
    """Lay tokenised documents out in rows; append to notes what was cut or left out."""
    tokens, labels, lengths = documents.tokens, documents.labels, documents.lengths
    if cut := int((~documents.labelled & (lengths > seq_len)).sum()):
        notes.append(f"{cut:,} texts longer than {seq_len} tokens go on in the next row")
    if pack and documents.all_text:
        return TokenStream(tokens, eos_id, seq_len, len(lengths))
    begins, too_long = np.cumsum(lengths) - lengths, documents.labelled & (lengths > seq_len)
    kept = np.where(too_long, seq_len, lengths)
    loss_in_file, loss = (_count_loss(labels, begins, size) for size in (lengths, kept))
    barren, lost = loss_in_file == 0, (loss == 0) & (loss_in_file > 0)
    if too_long.any():
        notes.append(f"{too_long.sum():,} rows longer than {seq_len} tokens were cut there")
    if lost.any():
        where = f"beyond token {seq_len} (a larger --seq-len keeps them)"
        notes.append(f"{lost.sum():,} of them dropped, since all their loss tokens lie {where}")
    if barren.any():
        # One document a row keeps them, so that step n takes rows n * B to (n + 1) * B of the file.
        done = "dropped" if pack else "kept"
        notes.append(f"{barren.sum():,} rows {done} that never had a loss token")
    chosen = ~(lost | barren) if pack else ~lost
    begins, lengths = _cut(begins[chosen], kept[chosen], seq_len)
    row_of_piece = _first_fit(lengths, seq_len) if pack else np.arange(len(lengths))
    return DocumentRows(tokens, labels, begins, lengths, row_of_piece, int(chosen.sum()))


def lay_out_token_file(tokens: np.memmap, header: dict, seq_len: int, pack: bool):
    """Lay a token file out in rows; one document a row takes an index of 24 bytes a document."""
    eos_id, size = header.get("eos_id"), len(tokens)
    if pack:
        return TokenStream(tokens, eos_id, seq_len, header.get("documents"))
    parts = [(at, tokens[at : at + SCAN_TOKENS]) for at in range(0, size, SCAN_TOKENS)]
    ends = [at + 1 + np.flatnonzero(part == eos_id) for at, part in parts if eos_id is not None]
    borders = np.unique(np.concatenate([[0], *ends, [size]]))
    begins, lengths = _cut(borders[:-1], np.diff(borders), seq_len)
    return DocumentRows(tokens, None, begins, lengths, np.arange(len(begins)), len(borders) - 1)


def _cut(begins: np.ndarray, lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut documents into pieces of at most seq_len; a last piece of one token is left out."""
    pieces = np.maximum(1, -(-(lengths - 1) // seq_len))
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    left = np.repeat(lengths, pieces) - number * seq_len
    return np.repeat(begins, pieces) + number * seq_len, np.minimum(seq_len, left)


def _first_fit(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Return the row of each piece: within a window, the longest first, each in the first row with
    room for it. A window holds the pieces of about WINDOW_ROWS rows, in file order.
    """
    windows = (np.cumsum(lengths) - lengths) // (WINDOW_ROWS * seq_len)
    row_of_piece, num_rows, begin = np.zeros(len(lengths), np.int64), 0, 0
    for end in [*(np.flatnonzero(np.diff(windows)) + 1), len(lengths)]:
        free = np.full(end - begin, seq_len)
        for piece in np.argsort(-lengths[begin:end], kind="stable"):
            row = int(np.argmax(free >= lengths[begin + piece]))
            free[row] -= lengths[begin + piece]
            row_of_piece[begin + piece] = row
        # Rows are numbered by their first piece, so that they nearly keep the order of the file.
        _, first, row = np.unique(row_of_piece[begin:end], return_index=True, return_inverse=True)
        row_of_piece[begin:end] = num_rows + np.argsort(np.argsort(first))[row]
        num_rows, begin = num_rows + len(first), end
    return row_of_piece


def _count_loss(labels: np.ndarray | None, begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Count each document's loss tokens after the shift: its first label predicts nothing."""
    if labels is None:
        return np.maximum(lengths - 1, 0)
    before = np.concatenate([[0], np.cumsum(labels != IGNORE)])
    return before[begins + lengths] - before[begins + 1]
