"""The commands of ``sdo`` and what each does, in one line: all that ``sdo --help`` needs to know of them."""

from __future__ import annotations

# In the order in which a user meets them.
COMMANDS = {
    "demo": "two short recorded trainings, uniform and SDO, explained",
    "embed": "text -> embeddings",
    "plan": "dry run: the batches and exposures that an organizer would give",
    "probe": "before training: would SDO's neighbor batches change the gradients?",
    "doctor": "look at a run before it trains: signals, parameter, ids, plan, disk, memory",
    "sft": "supervised fine-tuning with TRL's SFTTrainer",
    "dpo": "direct preference optimization with TRL's DPOTrainer",
    "grpo": "reinforcement learning with TRL's GRPOTrainer",
    "coherence": "run folders -> step and batch coherence",
    "locality": "run folders -> do gradients follow embeddings?",
    "balance": "predictions -> balance over clusters",
    "exposure": "run folders or plans -> how often samples are seen",
    "compare": "runs of several seeds -> tests at each checkpoint",
    "report": "run folders, predictions -> one HTML file",
}
