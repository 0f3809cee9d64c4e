"""Trainers of Hugging Face Transformers on tiny models, run with evenstep's or with the plain one in one process."""

import gc
import os
import tempfile
from functools import partial

import torch
import torch.distributed as dist
import transformers
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset, SequentialSampler
from transformers.trainer_utils import HPSearchBackend

import evenstep
from evenstep.integrations.transformers import EvenstepTrainer, attach
from support.accelerate_habits import as_launched, forget
from support.training import weights

WORKERS = 3
BATCH = 5
SAMPLES = 77
LENGTH = 9
WORDS = 31


def in_float64(logits, labels, vocab_size, num_items_in_batch=None, **_):
    """The loss of causal language models, which Transformers computes in float32."""
    flat = logits[:, :-1].flatten(0, 1)
    total = cross_entropy(flat, labels[:, 1:].flatten(), reduction="mean" if num_items_in_batch is None else "sum")
    return total if num_items_in_batch is None else total / num_items_in_batch


def tiny_gpt(loss_function=in_float64):
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model = transformers.GPT2LMHeadModel(config).double()
    if loss_function is not None:
        model.loss_function = loss_function
    return model


def texts():
    """Rows of tokens, of which a different number counts in each."""
    generator = torch.Generator().manual_seed(2)
    rows = []
    for number in range(SAMPLES):
        words = torch.randint(WORDS, (LENGTH,), generator=generator)
        labels = words.clone()
        labels[: number % 7] = -100
        rows.append({"input_ids": words, "labels": labels})
    return rows


class Classifier(torch.nn.Module):
    """Not of Transformers; its loss is a mean over the batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(torch.nn.Embedding(WORDS, 4), torch.nn.Flatten(), torch.nn.Linear(36, 3))
        self.double()

    def forward(self, input_ids, labels=None):
        outputs = self.layers(input_ids)
        return {"loss": cross_entropy(outputs, labels), "logits": outputs}


def classes():
    return [{"input_ids": row["input_ids"], "labels": row["input_ids"].sum() % 3} for row in texts()]


class Run:
    """What a habit runs: `alone` in one process with the global batch, or on all workers."""

    def __init__(self, folder, alone, options):
        self.folder, self.alone, self.options = folder, alone, options

    def arguments(self, **more):
        common = {
            "output_dir": self.folder,
            "use_cpu": True,
            "per_device_train_batch_size": WORKERS * BATCH if self.alone else BATCH,
            "num_train_epochs": 2,
            "learning_rate": 0.1,
            "optim": "sgd",
            "report_to": [],
            "save_strategy": "no",
            "logging_steps": 2,
            "disable_tqdm": True,
        }
        return transformers.TrainingArguments(**{**common, **more})

    def trainer(self, kind=None, model=None, rows=None, **options):
        """A plain trainer if alone. `kind` makes a class of trainers from the one to be derived from."""
        base = transformers.Trainer if self.alone else EvenstepTrainer
        names = ("compute_loss_func", "eval_dataset", "callbacks", "compute_metrics", "data_collator")
        more = {name: options.pop(name) for name in names if name in options}
        if not self.alone:
            more["evenstep"] = self.options
        made = base if kind is None else kind(base)
        return made(
            model=tiny_gpt() if model is None else model,
            args=self.arguments(**options),
            train_dataset=texts() if rows is None else rows,
            **more,
        )

    def trained(self, *args, **options):
        trainer = self.trainer(*args, **options)
        trainer.train()
        return of(trainer)


def of(trainer):
    """The weights, and the losses that were logged, which are added up in float32."""
    names = ("loss", "train_loss")
    losses = [each[name] for each in trainer.state.log_history for name in names if name in each]
    return {"weights": weights(trainer.model), "losses": losses}


def every(schemes, more):
    """What each habit comes to, and each of `more`, alone (on one worker) and under each scheme; an error is text."""
    found = alone([*EXACT, *ROUNDED, *more])
    as_launched()
    for scheme, options in schemes.items():
        for habit in (*EXACT, *ROUNDED, *more, *MISTAKES):
            found[scheme, habit.__name__] = attempt(habit, alone=False, options={"timeout": 60.0, **options})
    os.environ["EVENSTEP_SLOW"] = "1=3x"
    found["slow", accumulate.__name__] = attempt(accumulate, alone=False, options={"timeout": 60.0})
    return found


def alone(habits):
    """What each habit comes to in one process, which is the first: only that one writes checkpoints."""
    habits = habits if dist.get_rank() == 0 else []
    return {("alone", habit.__name__): attempt(habit, alone=True, options=None) for habit in habits}


def attempt(habit, *, alone, options):
    forget()
    with tempfile.TemporaryDirectory() as mine:
        shared = [mine]
        if not alone:
            dist.broadcast_object_list(shared)
        try:
            return habit(Run(shared[0], alone, options))
        except evenstep.EvenstepError as error:
            return f"{type(error).__name__}: {error}"
        except Exception as error:
            return f"{type(error).__name__}: {error} (of {error.__cause__ or error.__context__!r})"
        finally:
            if not alone:
                dist.barrier()  # Before the folder goes.
            forget()
            gc.freeze()  # What was imported when needed: each training collects at its end.


# Losses.


def count_tokens(run):
    return run.trained()


def count_tokens_in_float32(run):
    """With the loss of Transformers."""
    return run.trained(model=tiny_gpt(loss_function=None))


def count_tokens_of_each_worker(run):
    return run.trained(average_tokens_across_devices=False)


def accumulate(run):
    """From batches as tokenizers make them."""
    return run.trained(gradient_accumulation_steps=4, data_collator=encoded)


def in_whole_batches(run, **more):
    """Arguments of a run whose workers have different numbers of batches of two in a step of 48 samples."""
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}
    return {**({"per_device_train_batch_size": 48} if run.alone else sizes), "logging_steps": 1, **more}


def count_tokens_of_whole_batches(run):
    counts = []

    class Counting(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if not run.alone:
                counts.append(trainer.accelerator._dataloaders[0].epochs.newest)

    trainer = run.trainer(callbacks=[Counting()], **in_whole_batches(run))
    trainer.train()
    assert run.alone or any(len(set(map(int, each.sizes))) > 1 for each in counts)
    assert run.alone or all(len(each.positions) <= 2 for each in counts)
    return of(trainer)


def average_over_whole_batches(run):
    return run.trained(model=Classifier(), rows=classes(), **in_whole_batches(run))


def copy_whole_batches(run):
    """As to a device, where memory does not tell which batch it is."""

    def kind(base):
        class Copying(base):
            def _prepare_inputs(self, inputs):
                return {name: value.clone() for name, value in super()._prepare_inputs(inputs).items()}

        return Copying

    return run.trained(kind, **in_whole_batches(run))


def look_into_batches(run):
    """In a class of its own, which is attached: each batch is then divided."""

    class Looking(transformers.Trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            assert set(inputs) >= {"input_ids", "labels"}
            return super().training_step(model, inputs, *args, **kwargs)

    trainer = Looking(model=tiny_gpt(), args=run.arguments(**in_whole_batches(run)), train_dataset=texts())
    if not run.alone:
        attach(trainer, **run.options)
    trainer.train()
    return of(trainer)


def ask_for_whole_batches(run):
    """With a loss of its own, which may communicate, they have to be asked for."""
    if not run.alone:
        run.options = {**run.options, "whole_batches": True}
    return run.trained(partial(averaging, scaled=False), **in_whole_batches(run))


class Trial(dict):
    """The parameters of a trial, as Ray gives them, and what Optuna's have besides."""

    number = 0

    @property
    def params(self):
        return self


def search_in_whole_batches(run):
    """Trials of a hyperparameter search, for each of which the trainer makes another Accelerator."""
    if not run.alone:
        run.options = {**run.options, "whole_batches": True}
    trainer = run.trainer(partial(averaging, scaled=False), **in_whole_batches(run))
    trainer.model_init = lambda: tiny_gpt()
    trainer.hp_search_backend, trainer.hp_space = HPSearchBackend.OPTUNA, Trial
    for rate in (0.05, 0.1):
        trainer.train(trial=Trial(learning_rate=rate))
        assert run.alone or trainer._trained.epochs.accumulation == 8
    return {**of(trainer), "losses": []}


def resume_in_whole_batches(run):
    """In the middle of the second epoch, in another trainer."""
    names = in_whole_batches(run, num_train_epochs=3)
    if run.alone:
        return {**run.trained(**names), "losses": []}
    run.trainer(save_strategy="steps", save_steps=3, **names).train()
    second = run.trainer(**names)
    second.train(resume_from_checkpoint=os.path.join(run.folder, "checkpoint-3"))
    return {**of(second), "losses": []}


def encoded(rows):
    return transformers.BatchEncoding(transformers.default_data_collator(rows))


def average_over_the_batch(run):
    """A model of its own, without `num_items_in_batch`; what is logged is the mean over workers."""
    trainer = run.trainer(model=Classifier(), rows=classes(), gradient_accumulation_steps=2)
    trainer.train()
    return {**of(trainer), "losses": []}


def give_a_loss(run):
    def loss_of(outputs, labels, num_items_in_batch=None):
        flat = outputs.logits[:, :-1].flatten(0, 1)
        return cross_entropy(flat, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch

    return run.trained(compute_loss_func=loss_of, gradient_accumulation_steps=2)


def pass_the_loss_on(run):
    """As the trainers of TRL do, for metrics of their own."""

    def kind(base):
        class Passing(base):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
                return (loss, outputs) if return_outputs else loss

        return Passing

    return run.trained(kind)


def averaging(base, scaled):
    """A trainer with a loss of its own, a mean over the batch."""

    class Averaging(base):
        loss_is_scaled_for_ga = scaled

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(input_ids=inputs["input_ids"])
            loss = cross_entropy(outputs.logits[:, -1], inputs["labels"][:, -1])
            return (loss, outputs) if return_outputs else loss

    return Averaging


def say_that_it_is_a_mean(run):
    trainer = run.trainer(partial(averaging, scaled=False), gradient_accumulation_steps=2)
    trainer.train()
    return {**of(trainer), "losses": []}


def bert(run, kind=transformers.BertForSequenceClassification, rows=None, **options):
    """A model that takes `num_items_in_batch` for its loss, which is a mean over the batch all the same."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    still = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, "num_labels": WORDS}
    model = kind(transformers.BertConfig(vocab_size=WORDS, **sizes, **still))
    trainer = run.trainer(model=model.double(), rows=rows or classes(), **options)
    assert trainer.model_accepts_loss_kwargs
    return trainer


def return_a_models_mean(run):
    trainer = bert(run)
    trainer.train()
    return of(trainer)


def return_a_models_mean_over_tokens(run):
    trainer = bert(run, transformers.BertForTokenClassification, texts())
    trainer.train()
    return of(trainer)


def say_that_a_model_returns_a_mean(run):
    trainer = bert(run)
    trainer.model_accepts_loss_kwargs = False
    trainer.train()
    return {**of(trainer), "losses": []}


# The life of a trainer.


def attach_later(run):
    """To a trainer of somebody's own class."""

    class Own(transformers.Trainer):
        def compute_loss(self, *args, **kwargs):
            self.computed = True
            return super().compute_loss(*args, **kwargs)

    trainer = Own(model=tiny_gpt(), args=run.arguments(), train_dataset=texts())
    if not run.alone:
        assert attach(trainer, **run.options) is trainer
        assert isinstance(trainer, Own)
        assert type(trainer).__name__ == "Own"
    trainer.train()
    assert trainer.computed
    return of(trainer)


def train_twice(run):
    trainer = run.trainer(num_train_epochs=1)
    trainer.train()
    trainer.train()
    return of(trainer)


def evaluate_and_schedule(run):
    trainer = run.trainer(
        eval_dataset=texts()[:40], eval_strategy="steps", eval_steps=3, warmup_steps=3, lr_scheduler_type="cosine"
    )
    trainer.train()
    assert sum("eval_loss" in each for each in trainer.state.log_history) == 4
    return of(trainer)


def group_by_length(run):
    """The order depends on the batch size of a process, so only the number of steps is the same."""
    trainer = run.trainer(train_sampling_strategy="group_by_length")
    return {"weights": [trainer.train().global_step], "losses": []}


def resume(run):
    """In the middle of the second epoch, in another trainer."""
    names = {"gradient_accumulation_steps": 2, "num_train_epochs": 3}
    if run.alone:
        return {**run.trained(**names), "losses": []}
    first = run.trainer(save_strategy="steps", save_steps=5, **names)
    first.train()
    saved = os.path.join(run.folder, "checkpoint-5")
    assert os.path.exists(os.path.join(saved, "evenstep.bin"))
    second = run.trainer(**names)
    second.train(resume_from_checkpoint=saved)
    return {**of(second), "losses": []}


def log_sizes(run):
    """To whatever listens, as the trackers of `report_to` do."""
    seen = []

    class Listener(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    trainer = run.trainer(callbacks=[Listener()])
    trainer.train()
    if not run.alone:
        logged = [each for each in seen if "loss" in each]
        assert len(logged) == 6
        sizes = [(each["evenstep/smallest_batch"], each["evenstep/largest_batch"]) for each in logged]
        assert all(0 <= least <= most <= 11 for least, most in sizes)
        assert run.options["scheme"] == "bsp" or any(least < most for least, most in sizes[:2])
        assert all(0 <= each["evenstep/waiting"] <= 1 for each in logged)
    return of(trainer)


EXACT = (
    count_tokens,
    count_tokens_of_each_worker,
    accumulate,
    count_tokens_of_whole_batches,
    average_over_whole_batches,
    copy_whole_batches,
    look_into_batches,
    ask_for_whole_batches,
    search_in_whole_batches,
    resume_in_whole_batches,
    average_over_the_batch,
    give_a_loss,
    pass_the_loss_on,
    say_that_it_is_a_mean,
    return_a_models_mean,
    return_a_models_mean_over_tokens,
    say_that_a_model_returns_a_mean,
    attach_later,
    train_twice,
    evaluate_and_schedule,
    group_by_length,
    resume,
    log_sizes,
)
"""Those that come to the numbers of one process, to 1e-10."""


ROUNDED = {count_tokens_in_float32: 1e-7}
"""Those that come to them within what they round."""


# Mistakes.


def say_nothing_of_ones_own_loss(run):
    return run.trained(partial(averaging, scaled=None))


def return_a_mean_for_a_sum(run):
    run.trained(compute_loss_func=lambda outputs, labels, **_: outputs.logits.mean())


def add_a_loss_over_samples_to_one_over_tokens(run):
    rows = [{**row, "next_sentence_label": row["input_ids"].sum() % 2} for row in texts()]
    bert(run, transformers.BertForPreTraining, rows).train()


def average_over_fewer_tokens_than_have_labels(run):
    sizes = {"embedding_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.ElectraForPreTraining(transformers.ElectraConfig(vocab_size=WORDS, **sizes))
    rows = [{**row, "labels": row["labels"].gt(9).long(), "attention_mask": row["labels"].ge(0)} for row in texts()]
    run.trained(model=model.double(), rows=rows)


def say_that_a_divided_loss_is_a_mean(run):
    trainer = run.trainer()
    trainer.loss_is_scaled_for_ga = False
    trainer.train()


def balance_by_lengths(run):
    return run.trained(train_sampling_strategy="batch_rebalance")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(texts())


def stream(run):
    return run.trained(rows=Stream(), max_steps=4)


def attach_twice(run):
    attach(run.trainer())


class RepeatSampler(SequentialSampler):
    """What GRPO and its relatives in TRL draw with."""


def compare_completions(run):
    def kind(base):
        class Comparing(base):
            def _get_train_sampler(self, dataset=None):
                return RepeatSampler(self.train_dataset)

        return Comparing

    return run.trained(kind)


def ask_for_whole_batches_of_given_sizes(run):
    run.options = {"timeout": 60.0, "batch_sizes": [1, 2, 3], "whole_batches": True}
    return run.trained(**in_whole_batches(run))


def resume_whole_batches_as_divided(run):
    names = in_whole_batches(run)
    run.trainer(save_strategy="steps", save_steps=1, **names).train()
    run.options = {**run.options, "whole_batches": False}
    run.trainer(**names).train(resume_from_checkpoint=os.path.join(run.folder, "checkpoint-1"))


MISTAKES = {
    resume_whole_batches_as_divided: "this checkpoint was saved with 8 whole batches of a worker in a step",
    ask_for_whole_batches_of_given_sizes: "whole_batches=True does not go with batch_sizes",
    compare_completions: "compares several completions of a prompt",
    say_nothing_of_ones_own_loss: "set loss_is_scaled_for_ga = False",
    return_a_mean_for_a_sum: "let the model or compute_loss_func divide",
    add_a_loss_over_samples_to_one_over_tokens: "the loss of BertForPreTraining does not depend",
    average_over_fewer_tokens_than_have_labels: "the loss of ElectraForPreTraining does not depend",
    say_that_a_divided_loss_is_a_mean: "set loss_is_scaled_for_ga = False",
    balance_by_lengths: "so give every worker the same sampler",
    stream: "evenstep.ShardedDataset",
    attach_twice: "attach takes a transformers.Trainer",
}
