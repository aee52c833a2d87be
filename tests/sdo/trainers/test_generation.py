"""GRPO and RLOO under an organizer, on real trainers: a random Llama of two layers, on the CPU."""

import shutil
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("trl")

import torch
from trl import RLOOTrainer
from trl.trainer.utils import RepeatSampler

from sdo import SDO, InputError, Uniform, attach
from sdo.trainers.generation import CompletionCount, GenerationLayout, GenerationSampler
from sdo.trainers.row_ids import refusals
from tests.generation import LETTERS, MATRIX, N, Watch, dataset, make, odd_length

# per device, accumulation, generations, steps per generation, iterations
GRID = [
    (4, 2, 2, None, 1),  # TRL's defaults: a generation batch is an optimizer step
    (4, 1, 2, 2, 2),  # four optimizer steps on one generation batch
    (2, 2, 4, 4, 1),  # groups cut into pieces by every micro-batch
    (4, 2, 4, 1, 2),  # both iterations inside one optimizer step
    (6, 1, 3, 3, 1),
]

pytestmark = [
    pytest.mark.usefixtures("quiet_datasets"),
    # `resume_from_checkpoint` loads torch's own files; the notice is transformers' and not ours.
    pytest.mark.filterwarnings("ignore:.*TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD.*:UserWarning"),
]


def by_generation_batch(steps, each):
    """Counts of trained prompts, by generation batch."""
    counts = {}
    for step, ids in steps:
        counts.setdefault(step // each, Counter()).update(ids)
    return counts


# ---------------------------------------------------------------------- layout


@pytest.mark.parametrize(("prompts", "generations", "per_generation", "iterations"), [(4, 2, 2, 1), (3, 4, 1, 3)])
def test_the_layout_is_that_of_repeat_sampler(prompts, generations, per_generation, iterations):
    """trl#4271, #3675, #4531: what is repeated, and how often."""
    plan = Uniform(12, seed=3).plan(batch_size=prompts)
    layout = GenerationLayout(prompts, generations, per_generation, iterations, 1)
    ours = GenerationSampler(plan, layout=layout)
    order = plan.batches(0, 12 // prompts).ravel()
    repeat = per_generation * iterations
    theirs = RepeatSampler(range(12), generations, batch_size=prompts, repeat_count=repeat, shuffle=False)
    assert list(ours) == [order[i] for i in theirs]
    assert len(ours) == len(theirs) == len(list(ours))


def test_nothing_is_dropped_at_the_end_of_an_epoch():
    plan = Uniform(11, seed=3).plan(batch_size=4)
    layout = GenerationLayout(4, 2, 2, 1, 2)
    sampler = GenerationSampler(plan, layout=layout)
    assert len(sampler) == len(list(sampler)) == 3 * 4 * 2 * 2
    assert set(sampler) == set(range(11))


def test_a_generation_batch_must_fill_whole_steps(tokenizer, tmp_path):
    trainer = make(tokenizer, tmp_path, (4, 2, 2, 3, 1))
    organizer = Uniform(N, seed=1)
    with pytest.raises(InputError, match=r"expected a multiple; fix: .*multiple of 2"):
        attach(trainer, organizer)
    assert any("expected a multiple" in refusal for refusal in refusals(trainer, organizer))
    assert "_get_train_sampler" not in vars(trainer)
    assert "compute_loss" not in vars(trainer)


# ---------------------------------------------------------------------- training


@pytest.mark.parametrize("grid", GRID)
def test_each_generation_batch_trains_its_planned_prompts(tokenizer, tmp_path, grid):
    """trl#2998, #3333, axolotl#2376: the order is the plan's, with shuffle_dataset too, which is on by default."""
    trainer = make(tokenizer, tmp_path, grid)
    assert trainer.args.shuffle_dataset
    watch = Watch(trainer, tokenizer)
    handle = attach(trainer, SDO(MATRIX, k=2, seed=1))
    trainer.train()

    per_device, accumulation, generations, per_generation, iterations = grid
    per_generation = per_generation or accumulation
    each = per_generation * iterations // accumulation
    assert handle.plan.batch_size == per_device * per_generation // generations
    assert [step for step, _ in watch.steps] == list(range(6))
    assert all(len(ids) == per_device * accumulation for _, ids in watch.steps)
    trained = np.zeros(N, dtype=int)
    for batch, counts in by_generation_batch(watch.steps, each).items():
        planned = handle.plan.batch(batch).tolist()
        if batch < 6 // each:
            assert counts == dict.fromkeys(planned, generations * iterations)
        else:  # cut off by max_steps
            assert set(counts) <= set(planned)
        trained[planned] += 1  # once a generation batch, at its first update
    assert handle.trained.tolist() == trained.tolist()


def test_groups_stay_whole_for_the_rewards(tokenizer, tmp_path):
    """trl#2803: what is normalized together belongs to one prompt."""
    calls = []

    def reward(prompts, completions, **kwargs):
        calls.append((list(prompts), kwargs["sample_id"], sorted(kwargs)))
        return odd_length(completions)

    trainer = make(tokenizer, tmp_path, (2, 2, 4, 4, 1), reward=reward)
    handle = attach(trainer, SDO(MATRIX, k=2, seed=1))
    trainer.train()
    assert len(calls) == 3  # three generation batches of two optimizer steps
    for batch, (prompts, ids, names) in enumerate(calls):
        assert [prompt[0] for prompt in prompts] == [LETTERS[i] for i in handle.plan.batch(batch) for _ in range(4)]
        assert ids == [i for i in handle.plan.batch(batch) for _ in range(4)]
        assert not [name for name in names if name.startswith("sdo")]  # nothing of ours reaches a reward


@pytest.mark.parametrize("columns", [True, False])
def test_ids_follow_a_shuffled_and_filtered_dataset(tokenizer, tmp_path, columns):
    """trl#1186, #3349: with remove_unused_columns the trainer drops the column, and the ids stay."""
    rows = dataset([7, 3, 9, 0, 4, 8])
    trainer = make(tokenizer, tmp_path, (4, 1, 2, 1, 1), steps=3, rows=rows, remove_unused_columns=columns)
    watch = Watch(trainer, tokenizer)
    handle = attach(trainer, SDO(MATRIX, k=2, seed=1))
    trainer.train()
    for step, ids in watch.steps:
        assert sorted(ids) == sorted(np.repeat(handle.plan.batch(step), 2).tolist())


def test_a_trainer_epoch_is_all_prompts_and_later_ones_go_on(tokenizer, tmp_path):
    trainer = make(tokenizer, tmp_path, (4, 1, 2, 1, 2), steps=-1, num_train_epochs=2)
    watch = Watch(trainer, tokenizer)
    handle = attach(trainer, Uniform(N, seed=5))
    trainer.train()
    assert trainer.state.global_step == 2 * 6 * 2  # epochs of six generation batches of two steps each
    for batch, counts in by_generation_batch(watch.steps, 2).items():
        assert counts == dict.fromkeys(handle.plan.batch(batch).tolist(), 4)
    assert handle.trained.sum() == 24


def test_workers_change_nothing(tokenizer, tmp_path):
    trainer = make(tokenizer, tmp_path, (4, 1, 2, 2, 1), steps=4, dataloader_num_workers=2)
    watch = Watch(trainer, tokenizer)
    handle = attach(trainer, SDO(MATRIX, k=2, seed=1))
    trainer.train()
    for batch, counts in by_generation_batch(watch.steps, 2).items():
        assert counts == dict.fromkeys(handle.plan.batch(batch).tolist(), 2)


def test_rloo_shares_the_design(tokenizer, tmp_path):
    trainer = make(tokenizer, tmp_path, (4, 1, 2, 2, 2), cls=RLOOTrainer)
    watch = Watch(trainer, tokenizer)
    handle = attach(trainer, SDO(MATRIX, k=2, seed=1))
    trainer.train()
    first = by_generation_batch(watch.steps, 4)[0]
    assert first == dict.fromkeys(handle.plan.batch(0).tolist(), 4)
    assert handle.trained.sum() == 8


# ---------------------------------------------------------------------- life cycle


def test_detach_leaves_the_trainer_as_it_was(tokenizer, tmp_path):
    trainer = make(tokenizer, tmp_path, (4, 1, 2, 1, 1), steps=2)
    hooks = len(trainer.model._forward_pre_hooks)
    before = dict(vars(trainer))
    callbacks = list(trainer.callback_handler.callbacks)
    handle = attach(trainer, SDO(MATRIX, k=2, seed=1))
    assert "compute_loss" in vars(trainer)
    with pytest.raises(InputError, match="already has an organizer"):
        attach(trainer, Uniform(N))
    handle.detach()
    handle.detach()
    after = vars(trainer)
    assert set(after) == set(before)
    assert all(after[name] is value for name, value in before.items())
    assert trainer.callback_handler.callbacks == callbacks
    assert len(trainer.model._forward_pre_hooks) == hooks
    trainer.train()  # with TRL's own order again
    attach(trainer, SDO(MATRIX, k=2, seed=1)).detach()


def test_two_trainers_do_not_touch_each_other(tokenizer, tmp_path):
    first = make(tokenizer, tmp_path / "a", (4, 1, 2, 1, 1), steps=2)
    second = make(tokenizer, tmp_path / "b", (4, 1, 2, 1, 1), steps=2)
    one = attach(first, SDO(MATRIX, k=2, seed=1))
    two = attach(second, SDO(MATRIX, k=2, seed=2))
    watch = Watch(second, tokenizer)
    one.detach()
    second.train()
    for step, ids in watch.steps:
        assert sorted(ids) == sorted(np.repeat(two.plan.batch(step), 2).tolist())


def test_a_second_train_begins_with_a_new_generation_batch(tokenizer, tmp_path):
    """The first call ends inside a generation batch, whose completions TRL would go on with."""
    trainer = make(tokenizer, tmp_path, (4, 1, 2, 4, 1), steps=3)
    handle = attach(trainer, SDO(MATRIX, k=2, seed=1))
    trainer.train()
    watch = Watch(trainer, tokenizer)
    trainer.args.max_steps = 4
    trainer.train()
    assert by_generation_batch(watch.steps, 4)[0] == dict.fromkeys(handle.plan.batch(0).tolist(), 2)


def test_a_layout_that_changes_after_attach_is_refused(tokenizer, tmp_path):
    trainer = make(tokenizer, tmp_path, (4, 1, 2, 2, 1))
    attach(trainer, SDO(MATRIX, k=2, seed=1))
    trainer.args.num_iterations = 2
    with pytest.raises(InputError, match="attach after the change"):
        trainer.train()


def test_an_environment_that_owns_the_prompts_is_refused(tokenizer, tmp_path):
    trainer = make(tokenizer, tmp_path, (4, 1, 2, 1, 1))
    trainer.environment_factories = {None: object}
    with pytest.raises(InputError, match="environment_factory is set"):
        attach(trainer, Uniform(N))


def test_an_iterable_dataset_is_refused(tokenizer, tmp_path):
    """trl#3213, #6351: prompts of a stream are not repeated in groups as a sampler would."""
    trainer = make(tokenizer, tmp_path, (4, 1, 2, 1, 1), rows=dataset().to_iterable_dataset())
    with pytest.raises(InputError, match="iterable; expected a map-style dataset"):
        attach(trainer, Uniform(N))


def test_completions_of_other_prompts_are_noticed():
    count = CompletionCount(GenerationLayout(2, 2, 2, 1, 1))
    with pytest.raises(RuntimeError, match=r"samples \[9\], which are not in the planned"):
        count.check(0, [4, 9], [4, 5])
    count.check(2, [4, 4], [4, 5])
    with pytest.raises(RuntimeError, match="3 completions of sample 4; expected 2"):
        count.check(3, [4, 5], [4, 5])
    count.check(5, [4, 4], [4, 5])  # a resumed run comes in half way: not all of it was seen


# ---------------------------------------------------------------------- resuming


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def run(tokenizer, folder, grid, *, resume=None, steps=6, **options):
    trainer = make(tokenizer, folder, grid, steps=steps, save_strategy="steps", save_steps=1, **options)
    watch = Watch(trainer, tokenizer)
    handle = attach(trainer, SDO(MATRIX, k=2, seed=1))
    trainer.train(resume_from_checkpoint=resume)
    return SimpleNamespace(trainer=trainer, watch=watch, handle=handle)


@pytest.mark.parametrize("grid", [(4, 2, 2, None, 1), (4, 1, 2, 2, 2)])
def test_resuming_at_any_step_trains_the_planned_prompts(tokenizer, tmp_path, grid):
    """trl#3148, #3247; at 11 prompts and B = 4, a trainer epoch is three generation batches: later ones are reached."""
    each = (grid[3] or grid[1]) * grid[4] // grid[1]
    steps = 5 * each - 1 if each > 1 else 5
    whole = run(tokenizer, tmp_path / "whole", grid, steps=steps)
    for stop in range(1, steps):
        folder = tmp_path / f"again-{stop}"
        checkpoint = tmp_path / "whole" / "out" / f"checkpoint-{stop}"
        if stop % each:
            with pytest.warns(UserWarning, match="generated anew from the same prompts"):
                again = run(tokenizer, folder, grid, steps=steps, resume=str(checkpoint))
        else:
            again = run(tokenizer, folder, grid, steps=steps, resume=str(checkpoint))
            assert torch.equal(weights(again.trainer), weights(whole.trainer))
            assert again.watch.steps == whole.watch.steps[stop:]
        counts = by_generation_batch(again.watch.steps, each)
        expected = by_generation_batch(whole.watch.steps, each)
        for batch, found in counts.items():
            assert set(found) <= set(whole.handle.plan.batch(batch).tolist())
            if batch * each >= stop and (batch + 1) * each <= steps:
                assert found == expected[batch]
        assert again.handle.trained.tolist() == whole.handle.trained.tolist()
        shutil.rmtree(folder)


def test_resuming_twice_in_a_row(tokenizer, tmp_path):
    grid = (4, 1, 2, 2, 1)
    whole = run(tokenizer, tmp_path / "whole", grid, steps=8)
    first = run(tokenizer, tmp_path / "b", grid, steps=5, resume=str(tmp_path / "whole/out/checkpoint-2"))
    second = run(tokenizer, tmp_path / "c", grid, steps=8, resume=str(tmp_path / "b/out/checkpoint-4"))
    assert first.watch.steps[:2] + second.watch.steps == whole.watch.steps[2:]
    assert torch.equal(weights(second.trainer), weights(whole.trainer))
    assert second.handle.trained.tolist() == whole.handle.trained.tolist()


def test_other_uses_of_a_generation_batch_than_the_checkpoints_are_refused(tokenizer, tmp_path):
    run(tokenizer, tmp_path / "a", (4, 1, 2, 2, 1), steps=2)
    with pytest.raises(InputError, match=r"served 2 optimizer step\(s\), now 4"):
        run(tokenizer, tmp_path / "b", (4, 1, 2, 2, 2), steps=4, resume=str(tmp_path / "a/out/checkpoint-2"))


# ---------------------------------------------------------------------- skipped updates


def test_a_generation_batch_is_an_exposure_unless_all_its_updates_were_skipped(tokenizer, tmp_path):
    """A GradScaler skips an update whose gradients overflow; here the callback is told so for each step."""
    trainer = make(tokenizer, tmp_path, (4, 1, 2, 2, 1))
    handle = attach(trainer, Uniform(N, seed=5))
    callback, state = handle._callback, SimpleNamespace(global_step=0, max_steps=20, stateful_callbacks={})
    skipped = [True, False, True, True, False, True, False]
    counted = np.zeros(N, dtype=int)
    first = handle.plan.batch(0).tolist()
    callback.on_train_begin(trainer.args, state, None, train_dataloader=trainer.get_train_dataloader())
    for step, skip in enumerate(skipped):
        planned = handle.plan.batch(step // 2).tolist()
        callback.on_step_begin(trainer.args, state, None)
        handle._ledger.note_ids(SimpleNamespace(sample_ids=planned))
        state.global_step += 1
        callback.on_step_end(trainer.args, state, None, optimizer=SimpleNamespace(step_was_skipped=skip))
        if step == 0:
            assert handle.trained.sum() == 0
        if step == 1:
            assert handle.trained[first].tolist() == [1] * 4  # at its first update that happened
    for batch in (0, 2, 3):  # both updates of batch 1 were skipped
        counted[handle.plan.batch(batch)] += 1
    assert handle.trained.tolist() == counted.tolist()
    # A checkpoint knows them too.
    state.stateful_callbacks["OrganizerCallback"] = callback.state()
    handle.trained[:] = 0
    trainer.state.global_step = state.global_step
    with pytest.warns(UserWarning, match="generated anew"):
        callback.on_train_begin(trainer.args, state, None, train_dataloader=trainer.get_train_dataloader())
    assert handle.trained.tolist() == counted.tolist()
