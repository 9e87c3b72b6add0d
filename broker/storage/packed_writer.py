"""Writes the rows of a ledger that takes no more entries into a file of packed rows. Blocks, in steps of some blocks.

Nothing that is read, and no name that a manifest knows, is touched here: whoever takes the file in names it in the
capture that comes of it. The rows that it was made of go later.

Invariants:
  PACKING-1  Rows are read with their checksums, so that what is damaged is never packed; and each block that was packed
      is unpacked and compared with its rows before it is written.
  PACKING-2  When the last step returns, the file is on disk. Its name is once a checkpoint has synced the folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import replace

from broker.errors import Corrupt
from broker.runtime.vfs import Vfs
from broker.storage.blocks import BLOCK_ROWS, HEADER_BYTES, LedgerCapture
from broker.storage.ledger_files import open_checked
from broker.storage.packed_rows import encode_end, pack_block, rows_column, unpack_block

_STEP_BLOCKS = 8
"""A step takes about 10 ms."""

Packing = Generator[None, None, LedgerCapture]


def pack_rows(vfs: Vfs, folder: str, capture: LedgerCapture) -> Packing:
    """The steps; they return the capture with packed rows. Raises Corrupt, OSError; cut short they leave a file."""
    assert capture.sealed and not capture.packed_bytes and capture.row_count
    target = capture.name(folder)._replace(packed=True)
    path = target.path("rows")
    with contextlib.suppress(FileNotFoundError):  # of an attempt that was cut short
        vfs.remove(path)
    with contextlib.ExitStack() as opened:
        source = opened.enter_context(contextlib.closing(open_checked(vfs, capture.name(folder), "rows")))
        file = vfs.open(path, create=True)
        opened.enter_context(contextlib.closing(file))
        file.pwrite([target.header("rows").encode()], 0)
        column, end, items = rows_column(capture), HEADER_BYTES, []
        for first in range(0, capture.row_count, BLOCK_ROWS * _STEP_BLOCKS):
            contents = []
            for low in range(first, min(first + BLOCK_ROWS * _STEP_BLOCKS, capture.row_count), BLOCK_ROWS):
                rows = column.read(source, low, min(BLOCK_ROWS, capture.row_count - low))
                item, content = pack_block(rows)
                if unpack_block(item, content, len(rows)).tobytes() != rows.tobytes():
                    raise Corrupt(f"The rows from {low} on are others once they are packed", path=path)
                items.append(item)
                contents.append(content)
            file.pwrite(contents, end)
            end += sum(map(len, contents))
            yield
        directory = encode_end(b"".join(items), capture.row_count)
        file.pwrite([directory], end)
        file.sync()
    return replace(capture, packed_bytes=end + len(directory))
