# %% [markdown]
# # Coherence and locality
#
# What do batches of neighbors do to gradients? Two short trainings of the same small model, one with uniform batches and one with SDO's,
# recorded; then *step coherence* (gradients of different steps), *batch coherence* (gradients within one step), and whether either follows
# the embeddings. No download; with your own runs, begin at "Reading the runs".

# %%
import tempfile
from pathlib import Path

import numpy as np
from datasets import Dataset
from IPython.display import Image, display
from transformers import PrinterCallback
from trl import SFTConfig, SFTTrainer

from analysis import (
    Run,
    batch_coherence,
    batch_coherence_series,
    coherence_heat_maps,
    coverage_curves,
    run_exposure,
    run_locality,
    save,
    signal_clouds,
    step_coherence,
    step_summary,
)
from diagnostics import GradientRecorder
from sdo import SDO, Embeddings, Uniform, attach
from sdo.demo.tiny_model import build
from sdo.demo.word_problems import generate
from sdo.embeddings.lsa import lsa

work = Path(tempfile.mkdtemp(prefix="sdo-notebook-"))


def show(figure):
    display(Image(save(figure, work / "figure.png", dpi=80)))


# %% [markdown]
# ## Two recorded trainings
#
# The embeddings go into a file, so that `run.json` can name it: locality needs them again.

# %%
problems = generate(240, seed=0)
texts = [p.prompt + p.completion for p in problems]
dataset = Dataset.from_dict(
    {
        "prompt": [p.prompt for p in problems],
        "completion": [p.completion for p in problems],
        "sample_id": list(range(len(problems))),
    }
)
np.save(work / "E.npy", lsa([p.prompt for p in problems], dim=32, seed=0))
embeddings = Embeddings.read(work / "E.npy")


def train(organizer, name):
    model, tokenizer = build(texts, seed=0, hidden=64, layers=2)
    args = SFTConfig(
        output_dir=str(work / "output"),
        max_steps=120,
        per_device_train_batch_size=8,
        learning_rate=2e-3,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )
    trainer = SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    attach(trainer, organizer)
    trainer.add_callback(GradientRecorder(work / name, sample_every=1))
    trainer.train()


train(Uniform(embeddings, seed=617), "uniform")
train(SDO(embeddings, seed=617), "sdo")

# %% [markdown]
# ## Reading the runs

# %%
runs = {name: Run.open(work / name) for name in ("uniform", "sdo")}
for name, run in runs.items():
    summary = step_summary(run.gradients("hidden", "step"))
    within = batch_coherence(run.iter_steps("hidden", "sample")).spread()
    print(
        f"{name}: step coherence {summary.mean.value:+.3f} over all pairs, {summary.lag_one.value:+.3f} over successive "
        f"steps; batch coherence {within.mean:+.3f}, quartiles {within.lower_quartile:+.3f} to {within.upper_quartile:+.3f}"
    )

# %% [markdown]
# ## Step coherence
#
# One diverging scale, centered at 0, for both. Pairs of steps that hold the same sample agree for that reason alone: `step_summary` keeps
# them apart (`sharing`, `disjoint`).

# %%
rows = {name: run.gradients("hidden", "step") for name, run in runs.items()}
matrices = {name: step_coherence(one.sketch, one.defined) for name, one in rows.items()}
show(coherence_heat_maps(matrices, title="Step coherence of hidden")[0])

# %% [markdown]
# ## Batch coherence
#
# In these two runs the gradients of SDO's batches agree more; whether the difference is more than chance takes several seeds (`sdo compare`).

# %%
series = {name: batch_coherence(run.iter_steps("hidden", "sample")) for name, run in runs.items()}
means = {name: one.spread().mean for name, one in series.items()}
print("; ".join(f"{name}: {mean:+.3f}" for name, mean in means.items()))
assert means["sdo"] > means["uniform"]
show(batch_coherence_series(series, title="Batch coherence of hidden")[0])

# %% [markdown]
# ## Do gradients follow embeddings?
#
# Steps depend on each other, so the plan itself is drawn anew from other seeds and the statistic computed again, drift and exposure removed.
# A p-value speaks of this run alone.

# %%
found = run_locality(runs["sdo"], signals=["hidden"], redraws=99)
hidden = found.signals["hidden"]
for name, one in (("steps", hidden.series), ("pairs of steps", hidden.matrix)):
    print(
        f"{name}: r = {one.value:+.3f}, p = {one.p}, {one.redraws} re-draws"
        + (f" ({one.reason})" if one.reason else "")
    )
slope = hidden.slope
print(f"pairs of samples: slope {slope.value:+.3f}, 95 % interval {slope.low:+.3f} to {slope.high:+.3f}")
show(signal_clouds(hidden, title="Locality of hidden, SDO")[0])

# %% [markdown]
# ## What the runs had seen
#
# SDO repeats samples: on the way it has seen fewer different ones at equal steps, and at the end, where both runs have seen them all, some more
# often than others. That belongs beside every comparison.

# %%
exposures = {name: run_exposure(run) for name, run in runs.items()}
for name, one in exposures.items():
    print(f"{name}: {one.coverage[-1]:.0%} of {len(one.times)} samples seen, Gini {one.gini().value:.3f}")
uniform, sdo = exposures["uniform"], exposures["sdo"]
assert (sdo.coverage <= uniform.coverage).all()
assert (sdo.coverage < uniform.coverage).any()
assert sdo.coverage[-1] == uniform.coverage[-1] == 1
assert sdo.gini().value > uniform.gini().value
show(coverage_curves(exposures)[0])
