"""The embedding matrix: made from texts, read, checked and kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdo.lazy import exports

if TYPE_CHECKING:
    from sdo.embeddings.cache import EmbeddingCache
    from sdo.embeddings.files import MatrixFile, read_matrix_file, write_matrix_file
    from sdo.embeddings.matrix import Embeddings, as_embeddings, within_batch_cosine
    from sdo.embeddings.resolution import Resolution, measure_resolution
    from sdo.embeddings.sentence import SentenceEncoder
    from sdo.embeddings.sources import Source, open_source
    from sdo.embeddings.streaming import encode_to_disk
else:
    __getattr__, __dir__ = exports(__name__)

__all__ = [
    "EmbeddingCache",
    "Embeddings",
    "MatrixFile",
    "Resolution",
    "SentenceEncoder",
    "Source",
    "as_embeddings",
    "encode_to_disk",
    "measure_resolution",
    "open_source",
    "read_matrix_file",
    "within_batch_cosine",
    "write_matrix_file",
]
