"""Token files for tests, written apart from the code that reads them."""

import json
from pathlib import Path

import numpy as np


def write_token_file(path: Path, documents, dtype: str = "uint16", eos_id: int | None = 0) -> Path:
    """Write documents, and eos_id after each, as a token file and its header."""
    ends = [] if eos_id is None else [eos_id]
    ids = np.array([i for document in documents for i in [*document, *ends]], np.dtype(dtype))
    path.write_bytes(ids.astype(f"<u{ids.itemsize}").tobytes())
    header = {"dtype": dtype, "tokenizer": "t", "count": len(ids), "eos_id": eos_id}
    header |= {"documents": len(documents), "largest_id": int(ids.max())}
    Path(f"{path}.json").write_text(json.dumps(header))
    return path
