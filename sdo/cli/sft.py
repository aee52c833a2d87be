"""``sdo sft``: supervised fine-tuning with TRL, organised and recorded."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from sdo.cli.config import OrganizerOptions
from sdo.cli.train import (
    DataOptions,
    add_training_parser,
    as_samples,
    check_before_loading,
    load_rows,
    plain_errors,
    read_options,
    resume_from,
)
from sdo.cli.trainer import Setup, train
from sdo.errors import InputError


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the parser of ``sdo``."""
    parser = add_training_parser(
        subparsers,
        "sft",
        "supervised fine-tuning with TRL's SFTTrainer",
        "sdo sft --config run.yaml --learning_rate 1e-5 --organizer.k 8 --recorder.out runs/k8",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train as the run file says.

    Returns
    -------
    int
        0; every failure before training is an :class:`InputError`.
    """
    return train(prepare(args))


def prepare(args: argparse.Namespace, *, scratch: str | None = None) -> Setup:
    """Build what the run file describes, up to but not including training.

    Parameters
    ----------
    args
        With ``config`` and ``overrides``.
    scratch
        A folder in the place of ``output_dir``, for a trainer that is only looked at: nothing is reported or pushed,
        and what an organizer or a recorder would refuse is written into :attr:`Setup.refused` instead of raised.

    Raises
    ------
    InputError
        For wrong input, in one line.
    """
    try:
        import transformers
        from trl import ModelConfig, ScriptArguments, SFTConfig
    except ImportError as error:
        raise InputError(f"training needs {error.name}; mend: pip install 'sdo-toolkit[train]'") from error
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    options = read_options(args.config, args.overrides, (ScriptArguments, SFTConfig, ModelConfig, DataOptions))
    sft, model = options.trl[SFTConfig], options.trl[ModelConfig]
    if not model.model_name_or_path:
        raise InputError("model_name_or_path is missing; expected a folder or a hub id")
    setup = Setup(options=options, resume=resume_from(sft.resume_from_checkpoint, sft.output_dir))
    if scratch is None:
        check_before_loading(options, bool(setup.resume))
    else:
        setup.refused = []
        sft.output_dir, sft.report_to, sft.push_to_hub = scratch, [], False
    _build_trainer(setup)
    return setup


def _build_trainer(setup: Setup) -> None:
    """Load data, tokenizer and model, and build organizer and trainer."""
    from transformers import AutoConfig, AutoTokenizer
    from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, get_peft_config

    options = setup.options
    script, sft, model, data = (options.trl[c] for c in (ScriptArguments, SFTConfig, ModelConfig, DataOptions))
    id_column = OrganizerOptions().id_column if options.organizer is None else options.organizer.id_column
    source = (script.dataset_name, script.dataset_config)
    rows = load_rows(*source, script.dataset_train_split, id_column=id_column, what="dataset_name")
    setup.build_organizer(rows, sft.seed)
    # TRL moved the option from ModelConfig to the trainer's own arguments.
    trusted = any(bool(getattr(part, "trust_remote_code", False)) for part in (sft, model))
    with plain_errors(model.model_name_or_path):
        options_of_model = {"revision": model.model_revision, "trust_remote_code": trusted}
        AutoConfig.from_pretrained(model.model_name_or_path, **options_of_model)
        tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path, **options_of_model)
    train_rows = as_samples(rows.dataset, data, tokenizer, id_column=id_column, what="the training dataset")
    eval_rows = None
    if str(getattr(sft.eval_strategy, "value", sft.eval_strategy)) != "no":
        test = load_rows(*source, script.dataset_test_split, id_column=id_column, what="dataset_name")
        eval_rows = as_samples(test.dataset, data, tokenizer, id_column=id_column, what="the evaluation dataset")
    sft.model_init_kwargs = {
        "revision": model.model_revision,
        "trust_remote_code": trusted,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(sft.model_init_kwargs or {}),
    }
    setup.trainer = SFTTrainer(
        model=model.model_name_or_path,
        args=sft,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        peft_config=_peft_config(get_peft_config, model),
    )


def _peft_config(make: Callable[[Any], Any], model: Any) -> Any:
    """Return the adapter's configuration, or None without ``use_peft``."""
    try:
        return make(model)
    except (ImportError, ValueError) as error:
        raise InputError(f"use_peft: {error}; mend: pip install 'sdo-toolkit[lora]'") from error
