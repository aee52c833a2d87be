# %% [markdown]
# # Instrument your own TRL script
#
# You have a TRL script and a dataset. Three lines make its batches SDO's and write down what each batch did to the gradients. Here
# they are added to a small SFT run that needs no download; in your own script, `model`, `args` and `dataset` are what you have.

# %%
import tempfile
from pathlib import Path

import pandas as pd
from datasets import Dataset
from transformers import PrinterCallback
from trl import SFTConfig, SFTTrainer

from analysis import Run, batch_coherence, step_summary
from diagnostics import GradientRecorder, doctor
from sdo import SDO, attach
from sdo.demo.tiny_model import build
from sdo.demo.word_problems import generate
from sdo.embeddings.lsa import lsa

work = Path(tempfile.mkdtemp(prefix="sdo-notebook-"))

# %% [markdown]
# ## The script that you have
#
# 160 made-up word problems and a language model of about a million parameters, made on the spot.

# %%
problems = generate(160, seed=0)
dataset = Dataset.from_dict({"prompt": [p.prompt for p in problems], "completion": [p.completion for p in problems]})
model, tokenizer = build([p.prompt + p.completion for p in problems], seed=0)
args = SFTConfig(
    output_dir=str(work / "output"),
    max_steps=40,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=2e-3,
    logging_steps=1,
    save_steps=20,
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    dataloader_pin_memory=False,
    report_to="none",
    disable_tqdm=True,
    log_level="error",
)

# %% [markdown]
# ## Embeddings
#
# One row for each row of the dataset. Built-in LSA is enough to start with; `sdo embed --encoder sentence-transformers` runs a model.
# A column `sample_id` says which row belongs to a sample, so that shuffling and filtering do no harm.

# %%
embeddings = lsa([p.prompt for p in problems], dim=32, seed=0)
dataset = dataset.add_column("sample_id", list(range(len(dataset))))
embeddings.shape

# %% [markdown]
# ## The three lines
#
# `attach` organizes, `GradientRecorder` records; each works without the other. Sample rows are taken at every second step.

# %%
trainer = SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)
trainer.remove_callback(PrinterCallback)  # its lines would hide what this notebook shows
handle = attach(trainer, SDO(embeddings, seed=617))
trainer.add_callback(GradientRecorder(work / "run", sample_every=2))

# %% [markdown]
# ## Before it trains
#
# The doctor runs one micro-step of two rows, says what would be recorded and what would be refused, and leaves the trainer as it was.

# %%
print(doctor(trainer))

# %% [markdown]
# The plan is known before training: which samples step 0 will train, and how the first organizer epoch looks.

# %%
first = handle.plan.epoch(0)
print("step 0 trains samples", handle.plan.batch(0).tolist())
print(f"organizer epoch 0: {first.steps} steps, mean exposure {first.exposure.mean():.2f}")

# %%
result = trainer.train()
handle.trained.sum(), handle.trained.max()

# %% [markdown]
# ## The run folder
#
# Plain Parquet and JSON; pandas, polars and DuckDB open it.

# %%
steps = pd.read_parquet(work / "run" / "steps")
steps[["step", "organizer_epoch", "loss", "grad_norm", "clipped", "tokens", "sample_ids"]].head()

# %%
assert steps.sample_ids[0].tolist() == handle.plan.batch(0).tolist()
samples = pd.read_parquet(work / "run" / "gradients" / "hidden").query("kind == 'sample'")
samples[["step", "sample_ids", "tokens", "norm"]].head()

# %% [markdown]
# From Python: step coherence compares the gradients of two steps, batch coherence those of the samples within one.

# %%
run = Run.open(work / "run")
summary = step_summary(run.gradients("hidden", "step"))
within = batch_coherence(run.iter_steps("hidden", "sample")).spread()
print(f"step coherence, all pairs of steps: {summary.mean.value:+.3f} ({summary.mean.count} pairs)")
print(f"batch coherence: {within.mean:+.3f} (mean of {within.count} steps)")

# %% [markdown]
# ## Resuming
#
# A checkpoint remembers what the plan is a function of. Training that resumes from it continues the same batches, and the recorder the
# same folder: the steps after the checkpoint are written again, none is lost and none comes twice.

# %%
model, _ = build([p.prompt + p.completion for p in problems], seed=0)
again = SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)
again.remove_callback(PrinterCallback)
attach(again, SDO(embeddings, seed=617))
again.add_callback(GradientRecorder(work / "run", sample_every=2))
again.train(resume_from_checkpoint=str(work / "output" / "checkpoint-20"))
resumed = pd.read_parquet(work / "run" / "steps")
assert resumed.step.tolist() == list(range(40))
assert [ids.tolist() for ids in resumed.sample_ids] == [ids.tolist() for ids in steps.sample_ids]
Run.open(work / "run").info["resumed_at"]

# %% [markdown]
# `sdo coherence RUN…`, `sdo report RUN…` and the other commands read such folders; the notebooks beside this one go on from here.
