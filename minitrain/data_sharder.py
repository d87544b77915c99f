"""From a global batch to this rank's share: shift labels, pad, slice rows (dp) and columns (sp).

The order matters: labels are shifted once, on whole rows, before the sequence is cut, so that the
last position of a slice still predicts the first token of the next.
Shapes: B rows of the global batch, S tokens per row; lower case is this rank's share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool

import torch
import torch.nn.functional as F
from torch import Tensor

from minitrain.documents import IGNORE
from minitrain.mesh import Mesh


@dataclass(frozen=True)
class Batch:
    """What one rank computes on.

    input_ids      int64 [b, s]
    labels         int64 [b, s], already shifted: position t predicts labels[t]; -100 = no loss
    position_ids   int64 [b, s], position within the document, counted over the whole row
    documents      int64 [b, S]: document of every position of the whole rows, on the host for cpu
                   and cuda; None: one document a row
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    documents: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """Move what the model reads to the device. Documents stay on the host, where their lengths
        are read, except for devices that compile: see attention.py.
        """
        tensors, documents = [self.input_ids, self.labels, self.position_ids], self.documents
        if device.type == "cuda":  # copies from pinned memory do not wait
            tensors = [x.pin_memory() for x in tensors]
        if documents is not None and device.type not in ("cpu", "cuda"):
            documents = documents.to(device)
        return Batch(*(x.to(device, non_blocking=True) for x in tensors), documents)

    def split(self, micro_batch_size: int, device: torch.device | None = None) -> list[Batch]:
        """Cut into micro-batches of micro_batch_size rows; the last may be shorter. Then move them:
        slices made on a device that compiles would be another program each.
        """
        tensors = [x for x in vars(self).values() if x is not None]
        batches = [Batch(*part) for part in zip(*(x.split(micro_batch_size) for x in tensors))]
        return batches if device is None else [batch.to(device) for batch in batches]


def shift_labels(labels_BS: Tensor, position_ids_BS: Tensor) -> Tensor:
    """Move each label to the position that predicts it; none leaves its document or row."""
    shifted = F.pad(labels_BS[:, 1:], (0, 1), value=IGNORE)
    starts_document = F.pad(position_ids_BS[:, 1:] == 0, (0, 1), value=True)
    return shifted.masked_fill(starts_document, IGNORE)


def shard_batch(rows, mesh: Mesh) -> Batch:
    """Cut this rank's share out of a global batch that every rank can build by itself.

    rows           anything with input_ids [B, S] and, if it has them, labels (not shifted, -100 =
                   no loss; default: every token counts), position_ids (restart at 0 with each
                   document) and documents (None: one a row)

    Returns        Batch on the host, [B / dp, S / sp], S padded with masked labels to a multiple of
                   sp * tp (tp may split the activations)
    Raises         ValueError when dp does not divide the rows
    """
    ids = torch.as_tensor(rows.input_ids)
    num_rows, length = ids.shape
    if num_rows % mesh.dp.size:
        raise ValueError(
            f"the batch must be a multiple of dp: {num_rows} rows on dp {mesh.dp.size}. "
            "Change --batch-size."
        )

    def given(name: str, default: Tensor | None) -> Tensor | None:
        value = getattr(rows, name, None)
        return default if value is None else torch.as_tensor(value)

    positions = given("position_ids", torch.arange(length).expand_as(ids))
    labels = shift_labels(given("labels", ids), positions)
    documents = given("documents", None)

    def mine(x: Tensor, padding: int, cut: bool = True) -> Tensor:
        x = F.pad(x, (0, -length % (mesh.sp.size * mesh.tp.size)), value=padding)
        x = x.chunk(mesh.dp.size)[mesh.dp.rank]
        return x.chunk(mesh.sp.size, 1)[mesh.sp.rank].contiguous() if cut else x

    if documents is not None:
        documents = mine(documents, torch.iinfo(torch.int32).max, cut=False)
    return Batch(mine(ids, 0), mine(labels, IGNORE), mine(positions, 0), documents)


def one_ahead(items: Iterable) -> Iterator:
    """Yield the items; a thread, which never keeps a process alive, makes the next meanwhile.

    items    made on the host, without the global random state: both are the caller's too

    Raises   what making an item raises, when it is the item's turn
    """
    thread, asked = ThreadPool(1), (iter(items), end := object())
    try:
        made = thread.apply_async(next, asked)
        while (item := made.get()) is not end:
            made = thread.apply_async(next, asked)
            yield item
    finally:
        thread.close()
