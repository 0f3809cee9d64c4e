"""More habits of scripts with a Trainer of Transformers, in the form of transformers_habits."""

import os

import transformers

from support.training import weights
from support.transformers_habits import WORKERS, Classifier, classes, of, texts, tiny_gpt


def load_the_best(run):
    """After evaluations during training, the model of the best checkpoint, which is not the last one."""
    names = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
    trainer = run.trainer(
        eval_dataset=texts()[:40], load_best_model_at_end=True, metric_for_best_model="eval_loss",
        greater_is_better=True, save_total_limit=2, **names,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_global_step < trainer.state.global_step
    return {**of(trainer), "losses": []}


def stop_at_a_step(run):
    return run.trained(max_steps=8)


def stop_at_a_step_while_accumulating(run):
    return run.trained(max_steps=5, gradient_accumulation_steps=4)


def smooth_and_accumulate(run):
    return run.trained(label_smoothing_factor=0.1, gradient_accumulation_steps=3)


def recompute(run):
    return run.trained(gradient_checkpointing=True)


def recompute_reentrantly(run):
    return run.trained(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})


def find_the_batch_size(run):
    """The first size is too large, as its second batch shows; nine tenths of it are not."""

    class Failing(transformers.TrainerCallback):
        failed = False

        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1 and not self.failed:
                self.failed = True
                raise RuntimeError("CUDA out of memory.")

    size = 10 * (WORKERS if run.alone else 1)
    trainer = run.trainer(auto_find_batch_size=True, per_device_train_batch_size=size, callbacks=[Failing()])
    trainer.train()
    return of(trainer)


def freeze_parts(run):
    """As adapters do."""
    model = tiny_gpt()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    return run.trained(model=model)


def clip(run):
    return run.trained(max_grad_norm=0.05)


def drop_the_last(run):
    return run.trained(dataloader_drop_last=True)


def fetch_in_processes(run):
    return run.trained(dataloader_num_workers=1, dataloader_persistent_workers=True)


def keep_all_columns(run):
    return run.trained(remove_unused_columns=False)


def judge_before_training(run):
    trainer = run.trainer(eval_dataset=texts()[:40], eval_on_start=True)
    trainer.train()
    return of(trainer)


def evaluate_metrics(run):
    """The predictions of an evaluation are of each sample once, and in order."""
    seen = []

    def metrics(predicted):
        seen.append(len(predicted.predictions))
        return {"mean": float(predicted.label_ids[:20].mean())}

    trainer = run.trainer(
        model=Classifier(), rows=classes(), eval_dataset=classes()[:37], compute_metrics=metrics, eval_strategy="epoch"
    )
    trainer.train()
    judged = [each["eval_mean"] for each in trainer.state.log_history if "eval_mean" in each]
    return {"weights": [*weights(trainer.model), *judged, *seen], "losses": []}


def resume_at_the_end_of_an_epoch(run):
    names = {"num_train_epochs": 3}
    if run.alone:
        return {**run.trained(**names), "losses": []}
    run.trainer(save_strategy="epoch", **names).train()
    second = run.trainer(**names)
    second.train(resume_from_checkpoint=os.path.join(run.folder, "checkpoint-6"))
    return {**of(second), "losses": []}


def resume_without_skipping(run):
    """From the last checkpoint, found by `True`, in the middle of an epoch, whose samples begin again."""
    names = {"num_train_epochs": 2, "ignore_data_skip": True}
    run.trainer(save_strategy="steps", save_steps=4, **{**names, "num_train_epochs": 1}).train()
    second = run.trainer(**names)
    second.train(resume_from_checkpoint=os.path.join(run.folder, "checkpoint-4"))
    return {**of(second), "losses": []}


def adamw(run):
    return run.trained(optim="adamw_torch", weight_decay=0.1, learning_rate=0.01)


def save_from_a_callback(run):
    """A checkpoint and evaluations at odd steps."""

    class Saving(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = state.global_step == 3
            control.should_evaluate = state.global_step in (3, 5)

    trainer = run.trainer(eval_dataset=texts()[:20], callbacks=[Saving()])
    trainer.train()
    return of(trainer)


def stop_from_a_callback(run):
    class Stopping(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 4

    trainer = run.trainer(callbacks=[Stopping()])
    trainer.train()
    return {**of(trainer), "losses": []}


EXACT = (
    load_the_best,
    stop_at_a_step,
    stop_at_a_step_while_accumulating,
    smooth_and_accumulate,
    recompute,
    recompute_reentrantly,
    find_the_batch_size,
    freeze_parts,
    clip,
    drop_the_last,
    fetch_in_processes,
    keep_all_columns,
    judge_before_training,
    evaluate_metrics,
    resume_at_the_end_of_an_epoch,
    resume_without_skipping,
    adamw,
    save_from_a_callback,
    stop_from_a_callback,
)
"""Those that come to the numbers of one process, to 1e-10."""
