"""The streams of a run folder as schemas of pyarrow: what the writer writes and the reader expects."""

from __future__ import annotations

import pyarrow as pa

from sdo.run_format import Stream


def schema_of(stream: Stream, stored: int = 0) -> pa.Schema:
    """Return the Parquet schema of a stream.

    Parameters
    ----------
    stream
        One of :data:`sdo.run_format.STREAMS`.
    stored
        Entries of a sketch; 0 leaves the column of sketches out.
    """
    types = {"ids": pa.list_(pa.int64()), "sketch": pa.list_(pa.float32(), stored)}
    return pa.schema(
        pa.field(one.name, types.get(one.type) or pa.type_for_alias(one.type), nullable=one.nullable)
        for one in stream.columns
        if stored or one.type != "sketch"
    )
