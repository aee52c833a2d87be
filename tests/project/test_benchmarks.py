"""The parts of benchmarks that machines must run unseen are tried here; no times are asserted."""

import json
import math
import threading

import numpy as np
import pytest

pytest.importorskip("torch", reason="benchmarks/ needs the extra train")

from benchmarks import __main__ as command
from benchmarks import gpu, results
from benchmarks.neighbors_speed import recall, sentence_like, without_self
from benchmarks.recorder_overhead import Turns


def test_the_gpu_script_runs_on_a_cpu_with_tiny_shapes(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(results, "FOLDER", tmp_path / "results")
    monkeypatch.setattr(gpu, "UNCOUNTED", 1)
    gpu.main(["--device", "cpu", "--tiny", "--steps", "1"])
    printed = capsys.readouterr().out
    assert "48 x 160 bfloat16: sketch" in printed
    assert "difference from the CPU's 0.0e+00" in printed
    assert "Qwen3 shape tiny" in printed
    assert printed.count("%") == 3
    assert not (tmp_path / "results").exists()


def test_shapes_are_qwen3s():
    """Parameters, tied head counted once: 596,049,920 and 4,022,468,096, as their model cards say: 0.6 B and 4.0 B."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {}
    for name, shape in gpu.MODELS.items():
        with torch.device("meta"):
            model = Qwen3ForCausalLM(Qwen3Config(**shape))
            model.tie_weights()  # transformers 5.0 leaves it out on this device
        sizes[name] = sum(p.numel() for p in model.parameters())
    assert sizes == {"0.6B": 596_049_920, "4B": 4_022_468_096}


def test_each_round_of_turns_begins_with_another():
    turns, seen = Turns(["a", "b", "c"]), []

    def one(name):
        for _ in range(3):
            turns.wait(name)
            seen.append(name)
            turns.end()

    threads = [threading.Thread(target=one, args=(name,)) for name in "cba"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == list("abcbcacab")


def test_a_failed_variant_stops_the_others():
    turns = Turns(["a", "b"])
    turns.fail()
    with pytest.raises(RuntimeError, match="another variant failed"):
        turns.wait("b")


def test_rows_look_like_sentence_embeddings():
    rows = np.concatenate(list(sentence_like(3000)))
    assert rows.shape == (3000, 384)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1.0, atol=1e-5)
    cosine = rows @ rows.T
    assert 0.3 < cosine[np.triu_indices(3000, 1)].mean() < 0.4
    assert (np.concatenate(list(sentence_like(3000))) == rows).all()


def test_recall_counts_what_was_found():
    found = without_self(np.array([5, 7]), np.array([[5, 1, 2, 3, 4], [1, 2, 3, 4, 6]]))
    assert found.tolist() == [[1, 2, 3, 4], [1, 2, 3, 4]]
    assert recall(found.tolist(), [[1, 2, 3, 4], [1, 9, 8, 2]]) == 0.75


def test_results_are_json_with_the_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "FOLDER", tmp_path / "results")
    results.save("one", {"ratio": 1.5})
    stored = json.loads((tmp_path / "results" / "one.json").read_text())
    assert stored["measured"] == {"ratio": 1.5}
    assert stored["machine"]["cores"] >= 1
    with pytest.raises(ValueError, match="not JSON compliant"):
        results.save("two", {"ratio": math.nan})


def test_least_times_of_several_rounds():
    calls = []
    took = results.interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=2)
    assert calls == ["a", "b"] * 3
    assert all(0 <= one.wall < 60 for one in took.values())


def test_an_unknown_benchmark_is_named(monkeypatch):
    monkeypatch.setattr("sys.argv", ["benchmarks", "nonsense"])
    with pytest.raises(SystemExit, match="unknown benchmark 'nonsense'"):
        command.main()
