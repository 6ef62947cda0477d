"""Record batches of Parquet and Arrow files, unpacked in parts and within the limit of an `Allowance`."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from components.data.unpacking import LIMIT_BYTES, Allowance

ROW_BYTES = 64
"""Memory of an empty row in bytes, which is the minimum of a row."""
VALUE_BYTES = 8
"""Memory of a reference in bytes, which is the minimum of a value."""
_BATCH_ROWS = 1024
"""Maximum number of rows of a record batch."""
_DELTA = "DELTA_BYTE_ARRAY"
"""Parquet encoding of texts that share a prefix with the previous text."""
_DICTIONARY_BATCH = 2
_RECORD_BATCH = 3


def parquet_batches(path: Path) -> Iterator[Any]:
    """Read the record batches of a Parquet file."""
    import pyarrow.parquet

    allowance = Allowance(path)
    # The metadata is read first, because the checks below must precede any row.
    with pyarrow.parquet.ParquetFile(path) as file:
        metadata = file.metadata
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    # Checked before anything is unpacked, because run lengths can encode a billion values in a few bytes.
    declared = sum(max(column.total_uncompressed_size, VALUE_BYTES * column.num_values) for column in columns)
    Allowance(path).add(declared + ROW_BYTES * metadata.num_rows)
    deltas = {column.path_in_schema for column in columns if _DELTA in column.encodings}
    leaves = [metadata.schema.column(number) for number in range(len(metadata.schema))]
    # Decimals can be stored as bytes too, but Arrow has no dictionaries of them.
    texts = {leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY" and leaf.converted_type != "DECIMAL"}
    _check_dictionaries(path, metadata.num_row_groups, sorted(texts - deltas))
    # The reader writes out the shared prefix of every text. Few rows are read at once, so that a batch stays small.
    longest = max((column.total_uncompressed_size for column in columns if column.path_in_schema in deltas), default=1)
    rows = min(_BATCH_ROWS, max(1, LIMIT_BYTES // (8 * max(longest, 1))))
    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=rows):
            allowance.add(unpacked_bytes(batch))
            yield batch


def _check_dictionaries(path: Path, groups: int, columns: list[str]) -> None:
    """Count the bytes of the texts of a Parquet file before its dictionaries are expanded.

    A text of 20 MB in a thousand rows is stored once, and would expand to 20 GB.
    """
    import pyarrow.parquet

    if not columns:
        return
    allowance = Allowance(path)
    with pyarrow.parquet.ParquetFile(path, read_dictionary=columns) as file:
        for number in range(groups):
            for batch in file.read_row_group(number, columns=columns).to_batches():
                allowance.add(unpacked_bytes(batch))


def ipc_batches(path: Path) -> Iterator[Any]:
    """Read the record batches of an Arrow file, in the stream format or in the file format."""
    import pyarrow

    allowance = Allowance(path)
    # Mapped into memory, so that uncompressed buffers are not copied.
    with pyarrow.memory_map(str(path)) as file:
        try:
            reader = pyarrow.ipc.open_stream(file)
        except pyarrow.ArrowInvalid:
            # `datasets` writes streams. Other programs write the file format: 8 bytes, a stream, and an index.
            _check_buffers(path, start=8)
            reader = pyarrow.ipc.open_file(file)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            _check_buffers(path, start=0)
            batches = iter(reader)
        for batch in batches:
            allowance.add(unpacked_bytes(batch))
            yield batch


def unpacked_bytes(data: Any) -> int:
    """Return the number of bytes of an Arrow array or record batch with its dictionaries expanded."""
    import pyarrow
    from pyarrow.compute import call_function

    if isinstance(data, pyarrow.RecordBatch):
        return ROW_BYTES * data.num_rows + sum(map(unpacked_bytes, data.columns))
    if isinstance(data.type, pyarrow.BaseExtensionType):
        return unpacked_bytes(data.storage)
    types = pyarrow.types
    kind = data.type
    count = len(data)
    if types.is_dictionary(kind):
        values = data.dictionary
        # As bytes, because the length of a string is its number of characters.
        if types.is_large_string(kind.value_type):
            values = values.view(pyarrow.large_binary())
        elif types.is_string(kind.value_type):
            values = values.view(pyarrow.binary())
        if types.is_binary(values.type) or types.is_large_binary(values.type):
            lengths = call_function("binary_length", [values]).take(data.indices).cast(pyarrow.int64())
            return VALUE_BYTES * count + int(call_function("sum", [lengths]).as_py() or 0)
        return count * -(-unpacked_bytes(values) // max(len(values), 1))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return VALUE_BYTES * count + unpacked_bytes(data.flatten())
    if types.is_struct(kind):
        return ROW_BYTES * count + sum(map(unpacked_bytes, data.flatten()))
    if types.is_map(kind):
        return ROW_BYTES * count + unpacked_bytes(data.keys) + unpacked_bytes(data.items)
    # Views and run lengths can repeat a value. In the worst case each row contains all values.
    if types.is_list_view(kind) or types.is_large_list_view(kind) or types.is_run_end_encoded(kind):
        return max(count, 1) * unpacked_bytes(data.values)
    return max(data.nbytes, VALUE_BYTES * count)


def _check_buffers(path: Path, start: int) -> None:
    """Count the bytes that the compressed buffers of an Arrow file unpack to, before any is unpacked."""
    import pyarrow

    allowance = Allowance(path)
    with pyarrow.memory_map(str(path)) as file:
        file.seek(start)
        for message in pyarrow.ipc.MessageReader.open_stream(file):
            body = memoryview(message.body or b"")
            for offset, length in _compressed_buffers(memoryview(message.metadata)):
                if length >= 8:
                    (unpacked_length,) = struct.unpack_from("<q", body, offset)
                    if unpacked_length < 0:  # -1 marks a buffer that is stored uncompressed
                        unpacked_length = length
                    allowance.add(unpacked_length)


def _compressed_buffers(metadata: memoryview) -> list[tuple[int, int]]:
    """Return the offsets and lengths of the compressed buffers of a message.

    Source: Message.fbs and the FlatBuffers binary format of the Arrow specification.
    """
    message = struct.unpack_from("<I", metadata, 0)[0]
    kind = _field(metadata, message, 1)
    header = _field(metadata, message, 2)
    if not kind or not header or metadata[kind] not in (_DICTIONARY_BATCH, _RECORD_BATCH):
        return []
    batch = _target(metadata, header)
    if metadata[kind] == _DICTIONARY_BATCH:
        batch = _target(metadata, _field(metadata, batch, 1))
    buffers = _field(metadata, batch, 2)
    if not buffers or not _field(metadata, batch, 3):
        return []
    vector = _target(metadata, buffers)
    (count,) = struct.unpack_from("<I", metadata, vector)
    return [struct.unpack_from("<qq", metadata, vector + 4 + 16 * number) for number in range(count)]


def _field(data: memoryview, table: int, number: int) -> int:
    """Return the position of a field of a FlatBuffers table, or 0 if the table does not have the field."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    entry = 4 + 2 * number
    if entry >= struct.unpack_from("<H", data, vtable)[0]:
        return 0
    offset = struct.unpack_from("<H", data, vtable + entry)[0]
    if not offset:
        return 0
    return table + offset


def _target(data: memoryview, position: int) -> int:
    return position + struct.unpack_from("<I", data, position)[0]
