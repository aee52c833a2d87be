import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from sdo.embeddings.sources import Selection, open_source, survey
from sdo.embeddings.streaming import ResumableMatrix, encode_to_disk, remove_work_files, work_files
from sdo.errors import InputError

# A process that embeds the file argv[1] into argv[2], three texts at a time, argv[3] seconds a chunk.
PROGRAM = """
import hashlib, sys, time
from pathlib import Path
import numpy as np
from sdo.embeddings.sources import Selection, open_source, survey
from sdo.embeddings.streaming import ResumableMatrix, encode_to_disk

def encode(texts):
    time.sleep(float(sys.argv[3]))
    print(len(texts), flush=True)
    return np.array([list(hashlib.sha256(t.encode()).digest()) for t in texts], dtype=np.float32)

source, selection = open_source(sys.argv[1]), Selection("q")
found = survey(source, selection)
matrix = ResumableMatrix(Path(sys.argv[2]), "key", found.rows, 32)
encode_to_disk((text for _, text in source.texts(selection)), found, encode, matrix, chunk=3)
"""


def rows_of(texts):
    return np.array([[len(text), ord(text[0])] for text in texts], dtype=np.float32)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("q\n" + "".join(f"text {i}\n" for i in range(20)))
    return open_source(str(path))


def embed(source, target, key="key", encode=rows_of, chunk=3):
    found = survey(source, Selection("q"))
    matrix = ResumableMatrix(target, key, found.rows, 2)
    start, seen = matrix.done, []
    texts = (text for _, text in source.texts(Selection("q")))
    encode_to_disk(texts, found, encode, matrix, chunk=chunk, report=seen.append)
    return start, seen


def test_chunks_give_the_matrix_of_one_call(source, tmp_path):
    start, seen = embed(source, tmp_path / "E.npy")
    assert (start, seen) == (0, [3] * 6 + [2])
    path, _ = work_files(tmp_path / "E.npy")
    rows = np.load(path)
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, rows_of([text for _, text in source.texts(Selection("q"))]))
    assert embed(source, tmp_path / "E.npy") == (20, [])  # finished, and not begun again
    remove_work_files(tmp_path / "E.npy")
    assert os.listdir(tmp_path) == ["t.csv"]


def test_killed_at_any_time_it_continues_to_the_same_bytes(source, tmp_path):
    def start(name, pause):
        argv = [sys.executable, "-c", PROGRAM, source.path, tmp_path / name, str(pause)]
        return subprocess.Popen(list(map(str, argv)), stdout=subprocess.PIPE, text=True)

    whole = start("whole.npy", 0)
    assert whole.communicate()[0].split() == ["3"] * 6 + ["2"]
    encoded = 0
    for kill in (True, True, False):
        process = start("killed.npy", 0.15 if kill else 0)
        if kill:
            process.stdout.readline()
            process.stdout.readline()
            time.sleep(0.05)
            os.kill(process.pid, signal.SIGKILL)
        out = process.communicate()[0]
        encoded += sum(map(int, out.split())) + (6 if kill else 0)
        assert process.returncode == (-signal.SIGKILL if kill else 0)
    assert 20 <= encoded <= 20 + 2 * 6  # at most the chunk in hand is done twice
    assert encoded < 2 * 20
    first, second = (work_files(tmp_path / name)[0].read_bytes() for name in ("whole.npy", "killed.npy"))
    assert first == second


def stop_after(chunks):
    calls = []

    def encode(texts):
        if len(calls) == chunks:
            raise KeyboardInterrupt
        calls.append(texts)
        return rows_of(texts)

    return encode


def test_another_key_or_a_damaged_file_begins_anew(source, tmp_path):
    target = tmp_path / "E.npy"
    work, record = work_files(target)

    def interrupt():
        with pytest.raises(KeyboardInterrupt):
            embed(source, target, encode=stop_after(2))

    interrupt()
    assert ResumableMatrix(target, "key", 20, 2).done == 6
    other = ResumableMatrix(target, "other", 20, 2)
    assert (other.done, other.discarded) == (0, True)
    other.close()
    interrupt()
    work.write_bytes(work.read_bytes()[:-4])
    assert ResumableMatrix(target, "key", 20, 2).done == 0
    interrupt()
    record.write_text("{")
    assert embed(source, target)[0] == 0


def test_a_source_that_changes_meanwhile_is_refused(source, tmp_path):
    texts = [text for _, text in source.texts(Selection("q"))]
    found = survey(source, Selection("q"))
    for now in ([*texts[:-1], "text XX"], texts[:-1], [*texts, "more"], ["text 9", *texts[1:]]):
        matrix = ResumableMatrix(tmp_path / "E.npy", str(now), 20, 2)
        with pytest.raises(InputError, match="the source changed while it was being embedded"):
            encode_to_disk(now, found, rows_of, matrix, chunk=3)
